"""Weights of a few bits: the formats by MLC-LLM's names, and arrays to and from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from .errors import QuantizationError
from .validation import plain, shown
from .workload import Packed
from .workload.formats import E2M1, EXPONENT
from .workload.reference import numpy_dtype
from .workload.unpacked import decoded

_BLOCK = 1 << 16
"""This many elements are quantised at once: what a step needs in memory stays in the caches."""


@dataclass(frozen=True)
class Quantization:
    """How the weights of a model are stored.

    A group of summed elements shares a scale: its largest over the largest code, or a power of 2.

    Parameters
    ----------
    name : str
        MLC-LLM's, or ``"mxfp4"``.
    dtype : str
        Of the model: its activations, norms and biases.
    packed : Packed
        How the weight of a projection is stored: as ``[n, k]`` where its `axis` is -1, as
        ``[k, n]`` where that is -2.
    only_experts : bool
        Whether it stores the weights of experts alone; all others stay as they are.
    """

    name: str
    dtype: str
    packed: Packed
    only_experts: bool = False

    @property
    def table(self) -> Packed:
        """How a table of embeddings ``[rows, width]`` is stored, whose rows are looked up."""
        return replace(self.packed, axis=-1)


def _groups(name: str, bits: int, group: int, dtype: str, axis: int = -1) -> Quantization:
    largest = 2 ** (bits - 1) - 1
    form = Packed(bits, group, zero=largest, scale_dtype=dtype, axis=axis)
    return Quantization(name, dtype, form)


MXFP4 = Packed(4, 32, zero=0, word="uint8", scale_dtype=EXPONENT, number=E2M1)
"""Of the Open Compute Project's "OCP Microscaling Formats (MX)", as gpt-oss has its experts."""

QUANTIZATIONS: Mapping[str, Quantization] = MappingProxyType(
    {
        q.name: q
        for q in (
            _groups("q3f16_0", 3, 40, "float16", axis=-2),
            _groups("q3f16_1", 3, 40, "float16"),
            _groups("q4f16_0", 4, 32, "float16", axis=-2),
            _groups("q4f16_1", 4, 32, "float16"),
            _groups("q4bf16_0", 4, 32, "bfloat16", axis=-2),
            _groups("q4bf16_1", 4, 32, "bfloat16"),
            _groups("q4f32_1", 4, 32, "float32"),
            _groups("q8f16_1", 8, 32, "float16"),
            Quantization("mxfp4", "bfloat16", MXFP4, only_experts=True),
        )
    }
)
"""The formats that weights can be quantised to."""


def quantization(name: str) -> Quantization:
    """Return the format of a name; raise `QuantizationError` if no format is called so."""
    found = QUANTIZATIONS.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(QUANTIZATIONS)
        raise QuantizationError(f"quantization is {shown(name)}; must be one of {known}")
    return found


def quantize(weight: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantise the weight of a projection.

    Parameters
    ----------
    weight : numpy.ndarray
        ``[n, k]``: a row for each output feature, of any floating type.
    name : str
        A name of `QUANTIZATIONS`, such as ``"q4f16_1"``.

    Returns
    -------
    words : numpy.ndarray
        uint32 (uint8 in mxfp4) ``[n, words]``, or ``[words, n]`` in formats that end in ``_0``; the
        element 0 of a word is in its lowest bits.
    scales : numpy.ndarray
        One for each group of elements along k, ``[n, groups]`` or ``[groups, n]``; in mxfp4 uint8,
        exponents of 2 plus 127.  That of a group with NaN or an infinity is not finite.

    Raises
    ------
    QuantizationError
        If `weight` is no such matrix, holds values beyond the range of the scales' type, or no
        format is called `name`.

    Examples
    --------
    >>> words, scales = quantize(np.ones((8, 64), "float32"), "q4f16_1")
    >>> words.shape, words.dtype, scales.shape, scales.dtype
    ((8, 8), dtype('uint32'), (8, 2), dtype('float16'))
    """
    return pack(weight, quantization(name).packed)


def dequantize(
    words: np.ndarray, scales: np.ndarray, name: str, features: int | None = None
) -> np.ndarray:
    """Return the weight that `quantize` made words and scales of, as kernels read it.

    Parameters
    ----------
    words, scales : numpy.ndarray
        What `quantize` returned.
    name : str
        The format.
    features : int, optional
        k of the weight; all that the words hold by default, which is more where the last group is
        not full.

    Returns
    -------
    numpy.ndarray
        ``[n, k]``, of the type of models in that format.

    Raises
    ------
    QuantizationError
        If the arrays are not of that format, or hold fewer features.
    """
    form = quantization(name).packed
    for what, array, dtype in (("words", words, form.word), ("scales", scales, form.scale_dtype)):
        if not isinstance(array, np.ndarray) or array.ndim != 2 or str(array.dtype) != dtype:
            raise QuantizationError(f"{what} are {_described(array)}; {name} has a {dtype} matrix")
    stored = words.shape[form.axis] * form.fields
    k = stored if features is None else plain(features)
    n = words.shape[-3 - form.axis]
    is_size = type(k) is int and k > 0
    shapes = [o.shape for o in form.operands("weight", form.along((n, n), k))] if is_size else []
    if [words.shape, scales.shape] != shapes:
        raise QuantizationError(
            f"words {list(words.shape)} and scales {list(scales.shape)} are no {name} weight of "
            f"{shown(k)} features"
        )
    whole = decoded(form, (words, scales), form.along((n, n), k)).astype(
        numpy_dtype(quantization(name).dtype)
    )
    return whole if form.axis == -1 else np.ascontiguousarray(whole.T)


def pack(weight: np.ndarray, form: Packed) -> tuple[np.ndarray, np.ndarray]:
    """Return the words and scales of a weight ``[n, k]`` in a format; see `quantize`."""
    _check_matrix(weight)
    n, k = weight.shape
    words = np.empty((n, form.words(k)), form.word)
    scales = np.empty((n, math.ceil(k / form.group)), numpy_dtype(form.scale_dtype))
    step = max(1, _BLOCK // k)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        words[rows], scales[rows] = _packed_rows(weight[rows], form)
    if form.axis == -1:
        return words, scales
    return np.ascontiguousarray(words.T), np.ascontiguousarray(scales.T)


def _check_matrix(weight: Any) -> None:
    is_array = isinstance(weight, np.ndarray)
    # The floating types of ml_dtypes are of the kind "V" to NumPy.
    floats = ("float64", "float32", "float16", "bfloat16")
    if not is_array or weight.ndim != 2 or 0 in weight.shape or str(weight.dtype) not in floats:
        raise QuantizationError(
            f"the weight is {_described(weight)}; must be a matrix [n, k] of {', '.join(floats)}"
        )


def _described(array: Any) -> str:
    return f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else shown(array)


def _packed_rows(rows: np.ndarray, form: Packed) -> tuple[np.ndarray, np.ndarray]:
    """Quantise some rows, in float32 or what is wider."""
    n, k = rows.shape
    assert form.zero is not None, "the formats of this module have one zero"
    groups = math.ceil(k / form.group)
    wide = np.float64 if rows.dtype == "float64" else np.float32
    grouped = np.zeros((n, groups * form.group), wide)
    grouped[:, :k] = rows
    grouped = grouped.reshape(n, groups, form.group)
    if form.number == E2M1:
        codes, scales = _halves(grouped)
        return _words(codes.reshape(n, -1)[:, :k], form), scales
    with np.errstate(all="ignore"):  # of what is not finite, and of scales that are rounded to 0
        largest = np.abs(grouped).max(axis=-1)
        scales = _scales(largest, form.zero, numpy_dtype(form.scale_dtype))
        codes = np.rint(grouped / scales.astype(wide)[..., None])
    codes = np.nan_to_num(codes, nan=0, posinf=0, neginf=0).clip(-form.zero, form.zero)
    return _words((codes + form.zero).reshape(n, -1)[:, :k], form), scales


def _words(codes: np.ndarray, form: Packed) -> np.ndarray:
    """Return words with the fields of rows."""
    n, k = codes.shape
    words = form.words(k)
    fields = np.zeros((n, words * form.fields), form.word)
    fields[:, :k] = codes
    shifts = (np.arange(form.fields) * form.bits).astype(form.word)
    shifted = fields.reshape(n, words, form.fields) << shifts
    return np.bitwise_or.reduce(shifted, axis=-1)


def _halves(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the fields and exponents of groups in MXFP4; weights that were in it stay as they are.

    The largest of a group gets the largest exponent of a number, which is 2.
    """
    largest = np.abs(groups).max(axis=-1)
    exponents = np.clip(np.frexp(largest)[1] - 3, -127, 127)
    with np.errstate(invalid="ignore"):
        numbers = np.clip(np.ldexp(groups, -exponents[..., None]), -6, 6)
    codes = np.nan_to_num(numbers).astype(ml_dtypes.float4_e2m1fn).view("uint8") & 15
    return codes, np.where(np.isfinite(largest), exponents + 127, 255).astype(EXPONENT)


def _scales(largest: np.ndarray, code: int, dtype: np.dtype) -> np.ndarray:
    """Return the largest of groups over a code; refuse what would be decoded as infinities."""
    scales = (largest / largest.dtype.type(code)).astype(dtype)
    limit = float(ml_dtypes.finfo(dtype).max)
    infinite = np.isfinite(largest) & ~np.isfinite(scales * dtype.type(code))
    lost = largest[infinite & (largest > limit)]
    if lost.size:
        raise QuantizationError(
            f"the weight holds {lost.max():.6g}, beyond the range of {dtype}, which ends at "
            f"{limit:.6g}"
        )
    return np.where(infinite, np.nextafter(scales, dtype.type(0)), scales)
