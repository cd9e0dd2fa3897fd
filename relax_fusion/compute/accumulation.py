"""The accumulation of a contraction: operands as they lie, in panels, or in vectors of words."""

from __future__ import annotations

from tvm import te, tirx

from ..workload import INTEGER_DTYPES
from .activations import ACCUMULATE
from .stages import Padding, Reader, Size, clamped, int64, round_up
from .words import SCALES, WORDS, accumulate_words, unpacked_panels


def accumulate(
    data: te.Tensor, weight: Reader, sizes: tuple[int, Size], name: str, padding: Padding
) -> te.Tensor:
    """Add the reduction ``acc[p, i, j] = sum_k data[i, k] * weight(p, j, k)``."""
    if padding.panels:
        return _accumulate_panels(data, weight, sizes, name, padding)
    if padding.words is not None:
        return accumulate_words(data, weight, sizes, name, padding)
    parts, n = sizes
    rows, k = data.shape
    r = te.reduce_axis((0, k), "k")
    total = "int32" if data.dtype in INTEGER_DTYPES else ACCUMULATE

    def product(p: tirx.Expr, i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        row, column = clamped(i, rows, padding.rows), clamped(j, n, padding.columns)
        x, w = data(row, r), weight(p, column, r)
        return te.sum(x.astype(total) * w.astype(total), axis=r)

    shape = (parts, round_up(rows, padding.rows), round_up(n, padding.columns))
    return te.compute(int64(shape), product, name)


def tiles_of(x: te.Tensor, height: int) -> te.Tensor:
    """Add x in tiles of `height` rows, ``[tiles, k, height]``, in float32.

    A tile is read forwards for every panel of columns.  The last row is repeated up to its end.
    """
    rows, k = x.shape
    return te.compute(
        int64((round_up(rows, height) // height, k, height)),
        lambda tile, r, i: x(clamped(tile * height + i, rows, height), r).astype(ACCUMULATE),
        "x_tiles",
    )


def panels_of(
    weight: Reader, sizes: tuple[int, Size, Size], width: int, name: str, dtype: str = ACCUMULATE
) -> te.Tensor:
    """Add the weights of ``sizes`` (parts, n, k) in panels, ``[panels, k, parts, width]``.

    A panel is read once from the weight, whatever the layout and dtype of that, and then forwards
    for every tile of rows.  The last column is repeated up to its end.
    """
    parts, n, k = sizes

    def element(panel: tirx.Expr, r: tirx.Expr, p: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        return weight(p, clamped(panel * width + j, n, width), r).astype(dtype)

    return te.compute(int64((round_up(n, width) // width, k, parts, width)), element, name)


def _panels(
    weight: Reader, sizes: tuple[int, Size, Size], index: str, padding: Padding
) -> te.Tensor:
    """Add the panels of a weight; where vectors of words are unpacked, these are put in panels."""
    vectors, width, name = padding.words, padding.columns, f"w_panels{index}"
    if vectors is None:
        return panels_of(weight, sizes, width, name)

    def stored(which: int, length: int, name: str, dtype: str) -> te.Tensor:
        def reader(p: tirx.Expr, j: tirx.Expr, r: tirx.Expr) -> tirx.Expr:
            return weight(p, j, r, which)

        return panels_of(reader, (*sizes[:2], length), width, f"{name}{index}", dtype)

    words = stored(WORDS, vectors.words, "w_words", vectors.form.word)
    return unpacked_panels(
        vectors, words, stored(SCALES, vectors.groups, "w_scales", ACCUMULATE), name
    )


def _accumulate_panels(
    tiles: te.Tensor, weight: Reader, sizes: tuple[int, Size], name: str, padding: Padding
) -> te.Tensor:
    """Add the same reduction over tiles of x and panels of the weight."""
    parts, n = sizes
    height, width = padding.rows, padding.columns
    count, k, _ = tiles.shape
    panels = _panels(weight, (parts, n, k), name.replace("acc", ""), padding)
    r = te.reduce_axis((0, k), "k")

    def product(p: tirx.Expr, i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        x, w = tiles(i // height, r, i % height), panels(j // width, r, p, j % width)
        return te.sum(x * w, axis=r)

    return te.compute(int64((parts, count * height, round_up(n, width))), product, name)
