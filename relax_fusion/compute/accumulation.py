"""The accumulation of a contraction: operands as they lie, in panels, or in vectors of words.

Words are weights that are packed along k, on a CPU.

Few rows (`accumulate_words`): a lane of a vector has a word, and unpacks one field of it after the
other.  The elements of x that a vector of fields meets are as far apart as a word has fields, so x
is put in that order first; sums over a vector of words are scaled, and not each element.  Stages,
beside those of `contraction`:

``x_words``     the rows by fields          [rows', chunks, fields, lanes], float32
``w_scales{i}`` the scale of each lane      [parts, n', chunks, lanes], float32
``part{i}``     sums over the fields        [parts, rows', n', chunks, lanes], float32
``lane{i}``     sums over the chunks        [parts, rows', n', lanes], float32

Many rows (`unpacked_panels`): words and scales are copied to panels, and unpacked there, once:

``w_words{i}``  the words in panels         [panels, words, parts, reg_n]
``w_scales{i}`` the scales in panels        [panels, groups, parts, reg_n], float32
"""

from __future__ import annotations

from tvm import te, tirx

from ..estimator.families.cpu_dots import Word
from ..estimator.families.words import MANTISSA_BITS, WordVectors
from ..workload import INTEGER_DTYPES, Packed
from .activations import ACCUMULATE
from .dot_words import WORD, column_word, products, word_at
from .rounded_rows import byte_word
from .stages import Padding, Reader, Size, clamped, int64, round_up


def accumulate(
    data: te.Tensor, weight: Reader, sizes: tuple[int, Size], name: str, padding: Padding
) -> Reader:
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


def tiles_of(x: te.Tensor, padding: Padding) -> te.Tensor:
    """Add x in tiles of rows, ``[tiles, k, height]``, in float32; or words of neighbours along k.

    A tile is read forwards for every panel of columns.  The last row is repeated up to its end.
    """
    (rows, k), height, dot = x.shape, padding.rows, padding.dot

    def element(tile: tirx.Expr, r: tirx.Expr, i: tirx.Expr) -> tirx.Expr:
        row = clamped(tile * height + i, rows, height)
        return word_at(dot, x, r, row) if dot else x(row, r).astype(ACCUMULATE)

    steps = k // dot.count if dot else k
    return te.compute(int64((round_up(rows, height) // height, steps, height)), element, "x_tiles")


def panels_of(
    weight: Reader,
    sizes: tuple[int, Size, Size],
    width: int,
    name: str,
    dtype: str = ACCUMULATE,
    dot: Word | None = None,
) -> te.Tensor:
    """Add the weights of ``sizes`` (parts, n, k) in panels, ``[panels, k, parts, width]``.

    They have numbers, or words of neighbours along k.  A panel is read once from the weight,
    whatever the layout and dtype of that, and then forwards for every tile of rows.  The last
    column is repeated up to its end.
    """
    parts, n, k = sizes

    def element(panel: tirx.Expr, r: tirx.Expr, p: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        column = clamped(panel * width + j, n, width)
        if dot is None:
            return weight(p, column, r).astype(dtype)
        return column_word(dot, lambda c, s: weight(p, c, s), r, column)

    steps = k // dot.count if dot else k
    return te.compute(int64((round_up(n, width) // width, steps, parts, width)), element, name)


def _panels(
    weight: Reader, sizes: tuple[int, Size, Size], index: str, padding: Padding
) -> te.Tensor:
    """Add the panels of a weight; where vectors of words are unpacked, these are put in panels."""
    vectors, width, dot, name = padding.words, padding.columns, padding.dot, f"w_panels{index}"
    if padding.laid is not None:
        parts, n, k = sizes
        steps, dtype = (k // dot.count, WORD) if dot else (k, ACCUMULATE)
        return padding.laid(name, (round_up(n, width) // width, steps, parts, width), dtype)
    if vectors is None:
        return panels_of(weight, sizes, width, name, dot=dot)

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
) -> Reader:
    """Add the same reduction over tiles of x and panels of the weight."""
    parts, n = sizes
    height, width = padding.rows, padding.columns
    (count, steps, _), dot = tiles.shape, padding.dot
    k = steps * dot.count if dot else steps
    if padding.rounded is not None:
        return _accumulate_groups(tiles, weight, sizes, name, padding)
    panels = _panels(weight, (parts, n, k), name.replace("acc", ""), padding)
    r = te.reduce_axis((0, steps), "k")

    def product(p: tirx.Expr, i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        x, w = tiles(i // height, r, i % height), panels(j // width, r, p, j % width)
        return te.sum(products(dot, x, w) if dot else x * w, axis=r)

    acc = te.compute(int64((parts, count * height, round_up(n, width))), product, name)
    return _shifted(acc, padding.added) if padding.added is not None else acc


def _shifted(acc: te.Tensor, added: te.Tensor) -> Reader:
    """Return what reads sums with what is added to those of each row."""
    return lambda p, i, j: acc(p, i, j) + added(i)


def _accumulate_groups(
    tiles: te.Tensor, weight: Reader, sizes: tuple[int, Size], name: str, padding: Padding
) -> Reader:
    """Add the same reduction over rows in bytes: sums of groups are scaled, and not elements."""
    (parts, n), index, vectors = sizes, name.removeprefix("acc"), padding.words
    (count, steps, height), width, rounded = tiles.shape, padding.columns, padding.rounded
    assert vectors is not None and rounded is not None and padding.dot is not None
    form, dot, rows = vectors.form, padding.dot, rounded.step.shape[0]

    def stored(which: int, length: int, called: str, dtype: str) -> te.Tensor:
        def reader(p: tirx.Expr, j: tirx.Expr, r: tirx.Expr) -> tirx.Expr:
            return weight(p, j, r, which)

        return panels_of(reader, (parts, n, length), width, f"{called}{index}", dtype)

    words = stored(WORDS, vectors.words, "w_words", form.word)
    scales = stored(SCALES, vectors.groups, "w_scales", ACCUMULATE)
    columns, depth = round_up(n, width), form.group // dot.count
    panels = te.compute(
        int64((columns // width, steps, parts, width)),
        lambda panel, r, p, j: byte_word(form, words, r, panel, p, j),
        f"w_panels{index}",
    )
    r, g = te.reduce_axis((0, depth), "k"), te.reduce_axis((0, vectors.groups), "group")

    def product(g: tirx.Expr, p: tirx.Expr, i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        at = g * depth + r
        x, w = tiles(i // height, at, i % height), panels(j // width, at, p, j % width)
        return te.sum(products(dot, x, w), axis=r)

    shape = (parts, count * height, columns)
    part = te.compute(int64((vectors.groups, *shape)), product, f"part{index}")

    def scaled(p: tirx.Expr, i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        zeros = rounded.sums(clamped(i, rows, padding.rows), g) * tirx.const(form.zero, dot.sums)
        total = (part(g, p, i, j) - zeros).astype(ACCUMULATE)
        return te.sum(total * scales(j // width, g, p, j % width), axis=g)

    acc = te.compute(int64(shape), scaled, name)
    return lambda p, i, j: acc(p, i, j) * rounded.step(i)


WORDS, SCALES = 0, 1
"""These are the numbers of the operands that a packed weight is stored as."""

EXPONENT_BIAS = 127
"""The exponent of a float32 is stored with this number added to it."""


def field(form: Packed, word: tirx.Expr, which: tirx.Expr) -> tirx.Expr:
    """Return field number `which` of a word, less the zero point, in float32, exactly.

    The bits of the field, at most `MANTISSA_BITS`, become those of a mantissa, without a shift
    where they lie low enough, with the exponent for which the lowest of them counts 1.  What
    remains is to subtract the leading one and the zero point: two instructions of vectors, where a
    shift, a mask, a conversion and a subtraction are four.
    """
    assert form.zero is not None, "words with zeros apart are of no such kernel"
    fitting = MANTISSA_BITS // form.bits
    shift = (which // fitting * (fitting * form.bits)).astype("uint32")
    place = (which % fitting * form.bits).astype("uint32")
    exponent = (_uint32(EXPONENT_BIAS + MANTISSA_BITS) - place) << _uint32(MANTISSA_BITS)
    bits = word.astype("uint32") >> shift & _uint32(2**form.bits - 1) << place
    leading = tirx.reinterpret(ACCUMULATE, exponent) + tirx.const(float(form.zero), ACCUMULATE)
    return tirx.reinterpret(ACCUMULATE, bits | exponent) - leading


def _uint32(value: int) -> tirx.IntImm:
    return tirx.const(value, "uint32")


def _group(vectors: WordVectors, chunk: tirx.Expr, lane: tirx.Expr) -> tirx.Expr:
    words = vectors.words_of_group
    if words >= vectors.lanes:
        return chunk // (words // vectors.lanes)
    return chunk * (vectors.lanes // words) + lane // words


def x_words(x: te.Tensor, vectors: WordVectors, height: int) -> te.Tensor:
    """Add x in the order of fields, in float32, with zeros behind the last element.

    The last row is repeated up to a multiple of `height`.
    """
    rows, k = x.shape
    fields, lanes = vectors.form.fields, vectors.lanes
    exact = vectors.words * fields == vectors.k

    def element(i: tirx.Expr, c: tirx.Expr, f: tirx.Expr, lane: tirx.Expr) -> tirx.Expr:
        place = (c * lanes + lane) * fields + f
        value = x(clamped(i, rows, height), place).astype(ACCUMULATE)
        return value if exact else te.if_then_else(place < k, value, tirx.const(0.0, ACCUMULATE))

    shape = (round_up(rows, height), vectors.chunks, fields, lanes)
    return te.compute(int64(shape), element, "x_words")


def accumulate_words(
    x: te.Tensor, weight: Reader, sizes: tuple[int, Size], name: str, padding: Padding
) -> te.Tensor:
    """Add ``acc[p, i, j] = sum_k x[i, k] * weight(p, j, k)`` over `x_words`."""
    vectors, (parts, n), index = padding.words, sizes, name.removeprefix("acc")
    assert vectors is not None
    form, lanes = vectors.form, vectors.lanes
    rows, chunks, fields, _ = x.shape
    columns = round_up(n, padding.columns)

    def column(j: tirx.Expr) -> tirx.Expr:
        return clamped(j, n, padding.columns)

    def scale(p: tirx.Expr, j: tirx.Expr, chunk: tirx.Expr, lane: tirx.Expr) -> tirx.Expr:
        return weight(p, column(j), _group(vectors, chunk, lane), SCALES).astype(ACCUMULATE)

    lane_scales = te.compute(int64((parts, columns, chunks, lanes)), scale, f"w_scales{index}")
    f = te.reduce_axis((0, fields), "field")
    part = te.compute(
        int64((parts, rows, columns, chunks, lanes)),
        lambda p, i, j, c, lane: te.sum(
            x(i, c, f, lane) * field(form, weight(p, column(j), c * lanes + lane, WORDS), f), axis=f
        ),
        f"part{index}",
    )
    c = te.reduce_axis((0, chunks), "chunk")
    lane_sums = te.compute(
        int64((parts, rows, columns, lanes)),
        lambda p, i, j, lane: te.sum(part(p, i, j, c, lane) * lane_scales(p, j, c, lane), axis=c),
        f"lane{index}",
    )
    lane = te.reduce_axis((0, lanes), "lane")
    return te.compute(
        int64((parts, rows, columns)),
        lambda p, i, j: te.sum(lane_sums(p, i, j, lane), axis=lane),
        name,
    )


def unpacked_panels(
    vectors: WordVectors, words: te.Tensor, scales: te.Tensor, name: str
) -> te.Tensor:
    """Add the panels that panels of words and scales hold, ``[panels, k, parts, width]``."""
    panels, _, parts, width = words.shape
    form = vectors.form

    def element(panel: tirx.Expr, r: tirx.Expr, p: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        word = words(panel, r // form.fields, p, j)
        return field(form, word, r % form.fields) * scales(panel, r // form.group, p, j)

    return te.compute(int64((panels, vectors.k, parts, width)), element, name)
