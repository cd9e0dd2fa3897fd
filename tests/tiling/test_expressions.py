"""Tiling expressions: how many there are, and their notation."""

from __future__ import annotations

import pytest

from relax_fusion.errors import TilingError
from relax_fusion.tiling import Expression, expressions, iteration_space, parse

from .graphs import chain, norm_mlp, row_sums

TWO = iteration_space(chain(1024, 512, 1024, 512))


def test_two_contractions_have_26() -> None:
    found = [str(e) for e in expressions(TWO)]
    assert len(set(found)) == len(found) == 26
    assert sorted(e for e in found if "(" in e) == ["mn(k,h)", "nm(k,h)"]


def test_three_contractions_have_146() -> None:
    found = [str(e) for e in expressions(iteration_space(chain(64, 64, 64, 64, 64)))]
    flat = [e for e in found if "(" in e]
    assert (len(set(found)), len(found), len(flat)) == (146, 146, 26)
    assert {"mn(k,hp)", "hm(kn,p)", "pmn(k,h)", "kmh(n,p)"} <= set(flat)
    assert not {"mn(h,k)", "mh(k,n,p)", "m(nk,hp)"} & set(flat)


def test_one_contraction_and_a_norm_before() -> None:
    assert len(expressions(iteration_space(chain(64, 64, 64)))) == 6
    found = [str(e) for e in expressions(iteration_space(norm_mlp(64, 64, 64, 64)))]
    assert len(found) == 26 and "rj(k,o)" in found


def test_three_loops_side_by_side() -> None:
    found = [str(e) for e in expressions(iteration_space(row_sums("k", "h", "j")))]
    flat = ["m(k,h,j)", "m(kh,j)", "m(hk,j)", "m(k,hj)", "m(k,jh)"]
    flat += ["mk(h,j)", "km(h,j)", "mh(k,j)", "hm(k,j)", "mj(k,h)", "jm(k,h)"]
    assert sorted(e for e in found if "(" in e) == sorted(flat) and len(found) == 24 + 11


def test_branches_are_in_the_order_of_statements() -> None:
    found = [str(e) for e in expressions(iteration_space(row_sums("k", "h", "k")))]
    assert "m(k,h)" in found and "m(h,k)" not in found


@pytest.mark.parametrize("text", ["mhnk", "mn(k,h)", "m", "j0k(i,b12)", "row.j(col,k)", "a.row"])
def test_notation_both_ways(text: str) -> None:
    names = ["m", "h", "n", "k", "i", "j", "j0", "b12", "row", "col", "a"]
    assert str(parse(text, names)) == text


def test_all_expressions_are_read_back() -> None:
    for each in expressions(iteration_space(chain(64, 64, 64, 64, 64))):
        assert parse(str(each), "mnkhp") == each


def test_long_names_are_not_taken_apart() -> None:
    assert str(Expression(("mn", "k"))) == "mn.k"
    assert parse("mn.k", ("m", "n", "mn", "k")) == Expression(("mn", "k"))
    flat = Expression(("m",), (Expression(("row", "k")), Expression(("n",))))
    assert parse(str(flat), ("m", "n", "row", "k")) == flat


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mhnq", "'mhnq': no loop 'q' of m, h, n, k"),
        ("mhnm", "'mhnm' has the loop 'm' twice"),
        ("mn(k,h", "must be loops, as mhnk"),
        ("mn(k)", "must be loops"),
        ("mn(k,)", "must be loops"),
        ("mn)", "must be loops"),
        ("m(n)(k)", "must be loops"),
        ("m+n", "must be loops"),
        ("", "must be loops"),
    ],
)
def test_what_is_no_expression(text: str, message: str) -> None:
    with pytest.raises(TilingError) as raised:
        parse(text, ("m", "h", "n", "k"))
    assert message in str(raised.value)


def test_removing_loops() -> None:
    flat = parse("mn(k,h)", "mnkh")
    assert [str(flat.without(gone)) for gone in ("m", "k", "n", "mn")] == [
        *("n(k,h)", "mnh", "m(k,h)", "(k,h)")
    ]


def test_loops_around() -> None:
    assert parse("mhnk", "mnkh").path_to("n") == ("m", "h", "n")
    assert parse("mn(k,h)", "mnkh").path_to("mh") == ("m", "n", "h")
    assert parse("mn(k,h)", "mnkh").path_to("x") == ()
