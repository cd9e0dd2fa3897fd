"""Weights to words and scales, and back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from relax_fusion import QUANTIZATIONS, QuantizationError, dequantize, quantization, quantize

from .support.quantised import FORMATS

N, K = 6, 100
"""Features that are summed, which no format has whole groups of."""


INTEGERS = [name for name in QUANTIZATIONS if name != "mxfp4"]


def weight(dtype: str = "float32", scale: float = 1.0) -> np.ndarray:
    values = np.random.default_rng(5).standard_normal((N, K)) * scale
    return values.astype(getattr(ml_dtypes, dtype, dtype))


def error_over_scale(name: str, w: np.ndarray) -> np.ndarray:
    """Return how many scales of its group each element is off."""
    words, scales = quantize(w, name)
    form = QUANTIZATIONS[name].packed
    each = (scales if form.axis == -1 else scales.T).astype("float64").repeat(form.group, axis=-1)
    got = dequantize(words, scales, name, K).astype("float64")
    return np.abs(got - w.astype("float64")) / each[:, :K]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", INTEGERS)
def test_each_element_is_the_nearest_of_its_group(name: str, dtype: str) -> None:
    q = QUANTIZATIONS[name]
    # The largest element of a group is as far off as its scale was rounded.
    rounding = float(ml_dtypes.finfo(q.dtype).eps) * q.packed.zero
    assert error_over_scale(name, weight(dtype)).max() <= 0.5 + 2 * rounding


@pytest.mark.parametrize("name", INTEGERS)
def test_words_are_what_graphs_decode(name: str) -> None:
    words, scales = quantize(weight(), name)
    form = FORMATS[name]
    shapes = [(a.shape, str(a.dtype)) for a in (words, scales)]
    assert shapes == [(tuple(shape), dtype) for shape, dtype in form.shapes(N, K)]
    wanted = form.decoded([words, scales], K)
    np.testing.assert_array_equal(dequantize(words, scales, name, K), wanted)


def test_bits_of_a_word() -> None:
    w = np.zeros((1, 32), "float32")
    w[0, :4] = [3.5, -3.5, 0.5, -1.0]
    words, scales = quantize(w, "q4f32_1")
    assert scales.tolist() == [[0.5]]
    assert [f"{word:08x}" for word in words[0]] == ["7777580e", *["77777777"] * 3]


@pytest.mark.parametrize("name", ["q4f16_0", "q4f16_1"])
def test_large_weights_are_quantised_in_parts(name: str, monkeypatch) -> None:
    whole = quantize(weight(), name)
    monkeypatch.setattr(quantization, "_BLOCK", 2 * K)
    for got, wanted in zip(quantize(weight(), name), whole, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_what_is_quantised_already_stays_the_same() -> None:
    once = quantize(weight(), "q4f32_1")
    again = quantize(dequantize(*once, "q4f32_1", K), "q4f32_1")
    np.testing.assert_array_equal(again[0], once[0])


@pytest.mark.parametrize("scale", [0.0, 1e-9, 1e-6])
def test_groups_of_small_numbers(scale: float) -> None:
    """Scales that float16 has as 0, or with few digits, do no harm to what is next to them."""
    w = weight(scale=scale)
    w[:, 64:] = 1
    got = dequantize(*quantize(w, "q4f16_1"), "q4f16_1", K).astype("float64")
    assert np.abs(got[:, :64]).max() <= 2 * np.abs(w).max(where=w < 1, initial=0) + 2**-24
    np.testing.assert_allclose(got[:, 64:], 1, rtol=1e-3)


@pytest.mark.parametrize("name", INTEGERS)
def test_the_largest_number_of_a_type(name: str) -> None:
    """Scales that would be rounded up to give infinities are rounded down."""
    dtype = QUANTIZATIONS[name].dtype
    largest = float(ml_dtypes.finfo(dtype).max)
    got = dequantize(*quantize(np.full((N, K), -largest), name), name, K).astype("float64")
    np.testing.assert_allclose(got, -largest, rtol=2 * float(ml_dtypes.finfo(dtype).eps))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_groups_that_are_no_numbers(value: float) -> None:
    w = weight()
    w[1, 40] = value
    _, scales = quantize(w, "q4f16_1")
    wrong = ~np.isfinite(scales)
    assert wrong[1, 1] and wrong.sum() == 1


@pytest.mark.parametrize("name", ["", "q4", "Q4F16_1", None, 4, ["q4f16_1"]])
def test_names_that_nothing_has(name) -> None:
    for call in (quantize, lambda w, name: dequantize(w, w, name)):
        with pytest.raises(QuantizationError, match=r"must be one of q3f16_0, .*q8f16_1, mxfp4"):
            call(weight(), name)


@pytest.mark.parametrize(
    "w, says",
    [
        (weight()[0], r"float32 \[100\]; must be a matrix"),
        (np.zeros((4, 0)), r"float64 \[4, 0\]"),
        (np.zeros((4, 32), "int8"), "int8"),
        ([[1.0]], r"is \[\[1.0\]\]"),
        (np.full((1, 32), 1e5), "holds 100000, beyond the range of float16, which ends at 65504"),
        (np.full((1, 32), -1e300), r"holds 1e\+300, beyond"),
    ],
)
def test_what_cannot_be_quantised(w, says: str) -> None:
    with pytest.raises(QuantizationError, match=says):
        quantize(w, "q4f16_1")


@pytest.mark.parametrize(
    "change, says",
    [
        ({"features": 129}, "no q4f16_1 weight of 129 features"),
        ({"features": 96}, "of 96 features"),
        ({"features": 0}, "of 0 features"),
        ({"features": 100.0}, "of 100.0 features"),
        ({"words": np.zeros((N, 12), "uint32")}, "words .6, 12. and scales .6, 4."),
        ({"words": np.zeros((N, 16), "int32")}, "has a uint32 matrix"),
        ({"scales": np.zeros((N, 4), "float32")}, "has a float16 matrix"),
        ({"scales": None}, "scales are None"),
    ],
)
def test_what_cannot_be_dequantised(change: dict, says: str) -> None:
    words, scales = quantize(weight(), "q4f16_1")
    given = {"words": words, "scales": scales, "name": "q4f16_1", "features": K} | change
    with pytest.raises(QuantizationError, match=says):
        dequantize(**given)
