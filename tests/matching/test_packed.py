"""In which format a function decodes a weight: read from what it computes."""

from __future__ import annotations

import pytest
from tvm import te, tirx

from relax_fusion.matching.packed_format import Decoding, packed_format
from relax_fusion.workload import Packed

N, K = 64, 96
FIELDS, GROUP = 8, 32
IN_TURNS = (0, 4, 1, 5, 2, 6, 3, 7)


def field(words: te.Tensor, at: list[tirx.Expr], axis: int, order=range(FIELDS)) -> tirx.Expr:
    """Return four bits of a word, of which fields follow `axis` in an order."""
    place, word_at = at[axis] % FIELDS, list(at)
    word_at[axis] = at[axis] // FIELDS
    shift = tirx.const(4 * order[-1], "uint32")
    for turn in range(FIELDS - 1):
        shift = tirx.Select(place == turn, tirx.const(4 * order[turn], "uint32"), shift)
    return (words[tuple(word_at)] >> shift & tirx.const(15, "uint32")).astype("float16")


def decoding(
    *, across: bool = False, zeros: bool = False, order=range(FIELDS), turned: bool = False
) -> tirx.PrimFunc:
    """Return a function that decodes [k, n], groups along k; `turned` gives [n, k]."""
    groups = K // GROUP
    words = te.placeholder((K, N // FIELDS) if across else (K // FIELDS, N), "uint32", "words")
    scales = te.placeholder((groups, N), "float16", "scales")
    stored = [te.placeholder((groups, N // FIELDS), "uint32", "zeros")] if zeros else []

    def element(*at: tirx.Var) -> tirx.Expr:
        i, j = at[::-1] if turned else at
        zero = tirx.const(8, "float16")
        if zeros:
            zero = field(stored[0], [i // GROUP, j], 1, order)
        code = field(words, [i, j], 1 if across else 0, order)
        return (code - zero) * scales[i // GROUP, j]

    shape = [tirx.IntImm("int64", size) for size in ((N, K) if turned else (K, N))]
    out = te.compute(shape, element, "decoded")
    return te.create_prim_func([scales, words, *stored, out], index_dtype_override="int64")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("order, turns", [(range(FIELDS), 1), (IN_TURNS, 2)])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("across", [False, True])
def test_formats(across: bool, zeros: bool, order, turns: int, turned: bool) -> None:
    func = decoding(across=across, zeros=zeros, order=order, turned=turned)
    zero = None if zeros else 8
    form = Packed(4, GROUP, zero, axis=-2, across=across, turns=turns)
    assert packed_format(func) == Decoding(form, (1, 0, 2) if zeros else (1, 0), turned)


@pytest.mark.parametrize("order", [IN_TURNS[::-1], (1, 0, *range(2, FIELDS))])
def test_orders_that_no_format_has(order) -> None:
    assert packed_format(decoding(order=order)) is None
