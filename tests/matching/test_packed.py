"""In which format a function decodes a weight: read from what it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tvm import te, tirx

from relax_fusion.matching.packed_format import Decoding, packed_format
from relax_fusion.workload import Packed

Element = Callable[..., tirx.Expr]

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


# --- numbers of a byte -----------------------------------------------------------------------

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
BYTES = (N, K)


def of_bytes(element: Element, *given: tuple[tuple[int, ...], str], dtype: str = "float16"):
    """Return a function of tensors, of shapes and dtypes, that decodes [n, k]."""
    stored = [te.placeholder(shape, t, f"p{i}") for i, (shape, t) in enumerate(given)]
    shape = [tirx.IntImm("int64", size) for size in (N, K)]
    out = te.compute(shape, lambda j, k: element(j, k, *stored).astype(dtype), "decoded")
    return te.create_prim_func([*stored, out], index_dtype_override="int64")


def half(value: tirx.Expr) -> tirx.Expr:
    return value.astype("float16")


def wide(value: tirx.Expr) -> tirx.Expr:
    return value.astype("float32")


def clipped(value: tirx.Expr) -> tirx.Expr:
    return tirx.max(
        tirx.min(value, tirx.const(65504.0, "float32")), tirx.const(-65504.0, "float32")
    )


def byte(word: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
    """Return a byte as MLC-LLM reads it."""
    shifted = word >> (k % 4 * 8).astype("uint32")
    return shifted.astype("uint8") & tirx.const(255, "uint8")


def scaled(number: str, group: int, lines: int, **rest) -> Packed:
    given = {"word": number, "scale_dtype": "float32", "number": number, "lines": lines}
    return Packed(8, group, 0, **{**given, **rest})


TENSOR, ROWS = scaled(E4M3, -1, -1), scaled("int8", -1, 1, scale_dtype="float16")
DECODED = {
    "a cast": (
        scaled(E4M3, 1, 1, scale_dtype=""),
        of_bytes(lambda j, k, w: half(w[j, k]), (BYTES, E4M3)),
    ),
    "one scale": (
        TENSOR,
        of_bytes(lambda j, k, w, s: half(w[j, k]) * half(s[0]), (BYTES, E4M3), ((1,), "float32")),
    ),
    "one scale in float32, first": (
        scaled(E5M2, -1, -1),
        of_bytes(lambda j, k, w, s: s[()] * wide(w[j, k]), (BYTES, E5M2), ((), "float32")),
    ),
    "in words": (
        scaled(E4M3, -1, -1, word="uint32"),
        of_bytes(
            lambda j, k, w, s: half(tirx.reinterpret(E4M3, byte(w[j, k // 4], k))) * half(s[0]),
            *(((N, K // 4), "uint32"), ((1,), "float32")),
        ),
    ),
    "blocks": (
        scaled(E4M3, 40, 48),
        of_bytes(
            lambda j, k, w, s: wide(w[j, k]) * s[j // 48, k // 40],
            *((BYTES, E4M3), ((2, 3), "float32")),
        ),
    ),
    "a scale for each row": (
        ROWS,
        of_bytes(lambda j, k, w, s: half(w[j, k]) * s[j], (BYTES, "int8"), ((N,), "float16")),
    ),
    "a scale for each row, as R.dequantize": (
        replace(ROWS, limit=65504.0, zero=3),
        of_bytes(
            lambda j, k, w, s: clipped(
                wide(w[j, k].astype("int32") - tirx.const(3, "int32")) * wide(s[j])
            ),
            *((BYTES, "int8"), ((N,), "float16")),
        ),
    ),
    "a zero for each row": (
        replace(ROWS, zero=None),
        of_bytes(
            lambda j, k, w, s, z: half(w[j, k].astype("int32") - z[j].astype("int32")) * s[j],
            *((BYTES, "int8"), ((N,), "float16"), ((N,), "int8")),
        ),
    ),
    "unsigned": (
        Packed(8, 32, 128, "uint8"),
        of_bytes(
            lambda j, k, w, s: (half(w[j, k]) - half(tirx.const(128.0, "float32"))) * s[j, k // 32],
            *((BYTES, "uint8"), ((N, K // 32), "float16")),
        ),
    ),
}


@pytest.mark.parametrize("name", DECODED)
def test_numbers_of_a_byte(name: str) -> None:
    form, func = DECODED[name]
    assert packed_format(func) == Decoding(form, tuple(range(len(func.params) - 1)), False)


SQUARE = (N // 8, N // 8)
OTHERS = {
    "scales of the transposed weight": (
        lambda j, k, w, s: half(w[j, k]) * s[k // 8, j // 8],
        *((BYTES, "int8"), (SQUARE, "float16")),
    ),
    "zeros of the transposed weight": (
        lambda j, k, w, s, z: half(w[j, k].astype("int32") - z[k, j].astype("int32")) * s[j, k],
        *((BYTES, "uint8"), (BYTES, "float16"), ((K, N), "uint8")),
    ),
    "rounded to another type": (
        lambda j, k, w, s: half((half(w[j, k]) * s[j]).astype(E4M3)),
        *((BYTES, "int8"), ((N,), "float16")),
    ),
    "rounded, and widened again": (
        lambda j, k, w, s: half(wide(half(wide(w[j, k]) * s[j]))),
        *((BYTES, "int8"), ((N,), "float32")),
    ),
    "cut to integers": (
        lambda j, k, w, s: half(w[j, k].astype("int32")) * s[j],
        *((BYTES, E4M3), ((N,), "float16")),
    ),
    "a difference of int8, which wraps": (
        lambda j, k, w, s: half(w[j, k] - tirx.const(3, "int8")) * s[j],
        *((BYTES, "int8"), ((N,), "float16")),
    ),
    "a difference of unsigned integers": (
        lambda j, k, w, s: half((w[j, k // 8] >> 4 & tirx.const(15, "uint32")) - 8) * s[j],
        *(((N, K // 8), "uint32"), ((N,), "float16")),
    ),
    "a limit of numbers": (
        lambda j, k, w, s: clipped(wide(w[j, k])) * s[0],
        *((BYTES, E4M3), ((1,), "float32")),
    ),
    "limits of two sizes": (
        lambda j, k, w, s: tirx.max(tirx.min(wide(w[j, k]) * s[0], 2.0), -1.0),
        *((BYTES, E4M3), ((1,), "float32")),
    ),
    "a scale of the next row": (
        lambda j, k, w, s: half(w[j, k]) * s[(j + 1) % N],
        *((BYTES, "int8"), ((N,), "float16")),
    ),
    "a scale in turns": (
        lambda j, k, w, s: half(w[j, k]) * s[j, k % 4],
        *((BYTES, "int8"), ((N, 4), "float16")),
    ),
    "rows that are looked up": (
        lambda j, k, w, s, i: half(w[i[j], k]) * s[j],
        *((BYTES, "int8"), ((N,), "float16"), ((N,), "int64")),
    ),
    "the square of a scale": (
        lambda j, k, w, s: half(w[j, k]) * s[j] * s[j],
        *((BYTES, "int8"), ((N,), "float16")),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_format(name: str) -> None:
    element, *given = OTHERS[name]
    assert packed_format(of_bytes(element, *given)) is None
