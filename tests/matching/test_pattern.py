"""The view of a block, its guards, and the small predicates."""

from __future__ import annotations

import pytest
from tvm import relax, tirx

from relax_fusion import DynamicDim, NormMatmul, Projection, Reason
from relax_fusion.matching.pattern import BlockView, Match, Refused, free_vars, guard
from relax_fusion.matching.shapes import as_dim, as_dims, check_dtype, product, same_shape, static

from ..support.chains import Chain, module

BODY = "a = R.nn.relu(x); b = a; c = R.add(b, x); d = R.nn.silu(c); e = R.multiply(d, d)"


@pytest.fixture
def view():
    mod = module([Chain("main", "x[n,4]", BODY, "(e, c)")])
    return BlockView(mod["main"].body.blocks[0], mod)


def named(view: BlockView) -> dict:
    return {b.var.name: b.var for b in view.bindings}


def test_definitions_look_through_aliases(view: BlockView) -> None:
    v = named(view)
    assert view.call(v["b"], "relax.nn.relu") is not None
    assert view.call(v["b"], "relax.add") is None


def test_definitions_compare_no_variables(view: BlockView, monkeypatch: pytest.MonkeyPatch) -> None:
    v = named(view)
    compared: list[object] = []

    def same(one: relax.Var, other: object) -> bool:
        compared.append(one)
        return one.same_as(other)

    monkeypatch.setattr(relax.DataflowVar, "__eq__", same)
    for _ in range(2):
        assert view.call(v["b"], "relax.nn.relu") is not None
        assert [u.name for u in view.uses(v["d"])] == ["e"]
    assert not compared


def test_users_and_escapes(view: BlockView) -> None:
    v = named(view)
    assert view.uses(v["d"]) == [v["e"]] and view.only_user(v["d"]) == v["e"]
    assert view.only_user(v["c"]) is None and view.escapes(v["c"]) and not view.escapes(v["d"])


def test_dependence(view: BlockView) -> None:
    v = named(view)
    assert view.depends_on(v["e"], {v["a"]}) and not view.depends_on(v["c"], {v["d"]})
    assert free_vars(v["e"]) == [v["e"]]


def test_dependence_through_a_kernel(view: BlockView) -> None:
    v = named(view)
    work = NormMatmul(6, 32, (Projection(48, "kn"),), None, "float32", "float32")
    assert not view.depends_on(v["a"], {v["c"]})
    view.take(Match("", (v["a"], v["d"]), (), (), work))
    # One kernel computes a and d, so a waits for c, which only d reads.
    assert view.depends_on(v["a"], {v["c"]})


def test_guards() -> None:
    guard(True, Reason.AXIS, "")
    for call, reason in (
        (lambda: guard(False, Reason.AXIS, "why"), Reason.AXIS),
        (lambda: static(tirx.Var("n", "int64"), "n"), Reason.SHAPE),
        (lambda: static(0, "n"), Reason.SHAPE),
        (lambda: check_dtype("int8", "x"), Reason.DTYPE),
        (lambda: check_dtype("", "x"), Reason.DTYPE),
    ):
        with pytest.raises(Refused) as caught:
            call()
        assert caught.value.decline.reason == reason


def test_a_name_stands_for_one_size() -> None:
    n, m, other = (tirx.Var(name, "int64") for name in ("n", "m", "n"))
    names = [getattr(d, "name", d) for d in as_dims([n, other, 3, n, other])]
    assert names == ["n", "n_2", 3, "n", "n_2"]
    assert len({d.name for d in as_dims([n * m, m * n, n * 2])}) == 2
    assert [d.name for d in as_dims([n, m], {"m": 5}, reserved=["m", "m_2"])] == ["n", "m_3"]


def test_sizes() -> None:
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    assert product([2, tirx.IntImm("int64", 3)]) == 6 and product([]) == 1
    assert same_shape([n * 2, 4], [2 * n, 4]) and not same_shape([n], [m])
    assert not same_shape([n], [n, 1]) and not same_shape(None, [n])
    assert as_dim(tirx.IntImm("int64", 3)) == 3 and as_dim(n) == DynamicDim("n")
    assert as_dim(n * 2 + m, {"n": 4, "m": 3}).upper == 11
    assert as_dim(n * m, {"n": 4}).upper is None
