"""Chains whose weights are packed: one kernel reads the words, and the numbers are right."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

from relax_fusion import Report

from ..support.quantised import FORMATS, Bytes, Cast, numpy_dtype
from ..support.quantised_functions import (
    Layer,
    add_function,
    called,
    lowered,
    projected,
    random_array,
)
from ..support.quick import machine, quickly
from ..support.slow import sampled

K, N, ROWS = 128, 48, 5
WIDE = ("float16", "bfloat16", "float32")
READ = (
    *("q4f16_1", "q4f16_0", "q3f16_1", "q8f16_1", "q4bf16_1", "q4f32_1"),
    *("q4f16_autoawq", "e4m3_f16", "by_channel"),
    *("e4m3_tensor", "e4m3_blocks", "e4m3_words", "e4m3_bf16_blocks", "e5m2_tensor", "e4m3_f32"),
    *("int8_rows", "e4m3_rows"),
)
"""Formats that kernels unpack."""


def ffn(name: str, rows) -> tvm.IRModule:
    """norm -> gate and up, merged -> silu * up -> down + residual."""
    bb = relax.BlockBuilder()
    layer = Layer(bb, FORMATS[name])
    dtype = layer.format.dtype
    x, gamma = layer.param((rows, K), dtype), layer.param((K,), dtype)
    wide, narrow = layer.packed(2 * N, K), layer.packed(K, N) if N % 40 else None

    def emit():
        h = bb.emit(op.nn.rms_norm(x, gamma, axes=[-1], epsilon=1e-5))
        halves = bb.emit(op.split(projected(layer, h, wide, 2 * N, K), 2, axis=-1))
        y = bb.emit(op.multiply(op.nn.silu(halves[0]), halves[1]))
        return [op.add(projected(layer, y, narrow, K, N), x)]

    add_function(bb, "main", layer, emit)
    return bb.get()


def expected(name: str, arrays: list[np.ndarray]) -> np.ndarray:
    format = FORMATS[name]
    x, gamma, *packed = arrays
    half = len(packed) // 2
    wide, narrow = format.decoded(packed[:half], K), format.decoded(packed[half:], N)
    x, gamma, wide, narrow = (a.astype("float64") for a in (x, gamma, wide, narrow))
    h = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gamma
    gate, up = np.split(h @ wide.T, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up @ narrow.T + x


def inputs(name: str, rows: int) -> list[np.ndarray]:
    format, rng = FORMATS[name], np.random.default_rng(7)
    shapes = [((rows, K), format.dtype), ((K,), format.dtype)]
    shapes += format.shapes(2 * N, K) + format.shapes(K, N)
    arrays = [
        random_array(rng, *each) * (0.02 if n > 1 and each[1] in WIDE else 1)
        for n, each in enumerate(shapes)
    ]
    words = isinstance(format, Bytes) and format.word
    # No byte of a word may be NaN
    return [a & 0xBFBFBFBF if words and a.dtype == "uint32" else a for a in arrays]


@pytest.mark.parametrize("name", READ)
def test_kernels_read_words(name: str) -> None:
    report = Report()
    mod = lowered(ffn(name, tirx.Var("n", "int64")), phases=2, report=report, always_fuse=True)
    kernels = [call.args[0].name_hint for call in called(mod["main"])]
    assert [k[:10] for k in kernels] == ["fuse_gated", "fuse_matmu"]
    assert all("packed" in d.spelling for d in report.fused)


@pytest.mark.parametrize("name", sampled(READ, 2))
def test_numbers(name: str) -> None:
    mod = ffn(name, tirx.Var("n", "int64"))
    options = {"validate": "strict", "always_fuse": True, "variable_bounds": {"n": ROWS}}
    pipeline = relax.get_pipeline("relax_fusion", target="llvm", **options)
    run = machine(quickly(mod, pipeline))["main"]
    for rows in (1, ROWS):
        arrays = [
            a.astype(numpy_dtype(d)) for a, d in zip(inputs(name, rows), dtypes(name), strict=True)
        ]
        out = run(*map(tvm.runtime.tensor, arrays))[0].numpy()
        wanted = expected(name, arrays)
        eps = float(ml_dtypes.finfo(out.dtype).eps)
        error = np.abs(out.astype("float64") - wanted).max() / np.abs(wanted).max()
        assert error < 4 * eps + 1e-6


def dtypes(name: str) -> list[str]:
    format = FORMATS[name]
    shapes = [*format.shapes(2 * N, K), *format.shapes(K, N)]
    return [format.dtype, format.dtype, *(dtype for _, dtype in shapes)]


def test_words_across_k_are_not_for_fused_kernels_of_a_gpu() -> None:
    """The rule for matmuls by themselves decodes them on their way to tensor cores."""
    report = Report()
    mod = lowered(ffn("q4f16_autoawq", 1), "h200", phases=2, report=report, always_fuse=True)
    kernels = [call.args[0].name_hint.rstrip("1") for call in called(mod["main"])]
    assert kernels == ["dequantize_matmul", "dequantize_matmul"] and not report.fused
    assert all("words lie across k" in d.decline.detail for d in report.declined)


def wide_matmul(name: str) -> tvm.IRModule:
    """A matmul with a residual."""
    size = 4096
    bb = relax.BlockBuilder()
    layer = Layer(bb, FORMATS[name])
    x = layer.param((tirx.Var("n", "int64"), size), layer.format.dtype)
    weight = layer.packed(size, size)
    add_function(bb, "main", layer, lambda: [op.add(projected(layer, x, weight, size, size), x)])
    return bb.get()


@pytest.mark.parametrize("name", ["q4f16_1", "q4bf16_1", "q8f16_1"])
def test_hopper_unpacks_in_registers_from_17_rows_on(name: str) -> None:
    report = Report()
    lowered(wide_matmul(name), "h200", phases=2, report=report, backend="auto")
    (decision,) = report.fused
    families = {upper: plan.family for upper, plan in decision.plans.entries}
    few = [family for upper, family in families.items() if upper and upper <= 16]
    many = [family for upper, family in families.items() if not upper or upper > 16]
    assert few and set(few) == {"packed_rows"} and many and set(many) == {"cuda"}, families
    assert "cuda " in report.text()


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("name", ["e4m3_f32", "e4m3_words"])
def test_every_code_of_a_byte(name: str, rows: int) -> None:
    """NaN of both signs, both zeros and subnormal numbers; scales of 0 and below."""
    format, k, n = FORMATS[name], 128, 48
    bb = relax.BlockBuilder()
    layer = Layer(bb, format)
    x, packed = layer.param((rows, k), format.dtype), layer.packed(n, k)
    add_function(bb, "main", layer, lambda: [projected(layer, x, packed, n, k)])
    pipeline = relax.get_pipeline("relax_fusion", target="llvm", always_fuse=True)
    codes = np.arange(n * k, dtype="uint8").reshape(n, k)
    codes[2:][codes[2:] & 0x7F == 0x7F] = 0  # NaN in two columns only
    codes[2:5, ::7] = 0x80
    shapes = format.shapes(n, k)
    scales = np.linspace(-0.5, 0.5, int(np.prod(shapes[1][0])), dtype="float32")
    scales = scales.reshape(shapes[1][0])
    arrays = [
        np.random.default_rng(1).standard_normal((rows, k)).astype(format.dtype),
        codes.view(numpy_dtype(shapes[0][1])),
        scales,
    ]
    (out,) = machine(quickly(bb.get(), pipeline))["main"](*map(tvm.runtime.tensor, arrays))
    wanted = arrays[0].astype("float64") @ format.decoded(arrays[1:], k).astype("float64").T
    assert np.isnan(wanted).any(0).sum() == 2
    np.testing.assert_allclose(out.numpy(), wanted, rtol=2e-3, atol=1e-3 * np.nanmax(abs(wanted)))


@pytest.mark.parametrize("stored", ["uint8", "int8"])
def test_integers_without_scales_are_validated(stored: str) -> None:
    """The inputs of a comparison are scaled, but integers stay integers."""
    bb, form = relax.BlockBuilder(), Cast(stored)
    layer = Layer(bb, form)
    x, packed = layer.param((ROWS, K), "float16"), layer.packed(N, K)
    add_function(bb, "main", layer, lambda: [projected(layer, x, packed, N, K)])
    report = Report()
    lowered(bb.get(), phases=2, report=report, validate="strict", always_fuse=True)
    assert [d.spelling for d in report.fused] == ["matmul NT packed"]
