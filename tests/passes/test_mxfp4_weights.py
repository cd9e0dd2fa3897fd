"""Weights in MXFP4: every way in which a graph decodes them, and what kernels make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx

from relax_fusion import Report, dequantize, quantize
from relax_fusion.matching.packed_format import packed_format
from relax_fusion.models.mxfp4 import decoded as stored_decoded
from relax_fusion.quantization import MXFP4
from relax_fusion.workload.unpacked import decoded

from ..support.quantised_functions import Layer, add_function, called, lowered, projected
from ..support.quick import machine, quickly

K, N = 96, 40
Number = Callable[[tirx.Expr], tirx.Expr]


def by_exponent(bits: tirx.Expr) -> tirx.Expr:
    """The number as the format defines it."""
    exponent, mantissa = bits >> 1 & 3, (bits & 1).astype("float32") * 0.5
    power = (tirx.const(1, "int32") << tirx.max(exponent, 1)).astype("float32") * 0.5
    whole = tirx.Select(exponent == 0, mantissa, mantissa + 1.0) * power
    return tirx.Select(bits >= 8, whole * -1.0, whole)


def by_choices(bits: tirx.Expr) -> tirx.Expr:
    """The number as one of 16."""
    found: tirx.Expr = tirx.const(0, "float32")
    for code in range(16):
        value = float(np.uint8(code).view(ml_dtypes.float4_e2m1fn))
        found = tirx.Select(bits == code, tirx.const(value, "float32"), found)
    return found * 1.0


def without_subnormal(bits: tirx.Expr) -> tirx.Expr:
    """What looks like it, but has 1 where 0.5 is."""
    return tirx.Select(bits == 1, tirx.const(1, "float32"), by_exponent(bits)) * 1.0


def infinite(bits: tirx.Expr) -> tirx.Expr:
    """What has no number where it is cast."""
    endless = bits.astype("float32") * tirx.const(np.inf, "float32")
    return tirx.Select(bits == 1, endless.astype("int32").astype("float32"), by_exponent(bits))


def shifted(byte: tirx.Expr) -> tirx.Expr:
    """The float32 with an exponent, as bits."""
    return byte.astype("uint32") << tirx.const(23, "uint32")


class Written:
    """A weight whose numbers a function of 4 bits makes, with scales that are powers of 2."""

    dtype, layout = "float32", "nk"

    def __init__(self, number: Number, word: str = "uint8") -> None:
        self.number, self.form = number, replace(MXFP4, word=word)

    def shapes(self, n: int, k: int) -> list:
        return [(o.shape, o.dtype) for o in self.form.operands("w", (n, k))]

    def function(self, words: te.Tensor, scales: te.Tensor, bits_of: Number = shifted) -> te.Tensor:
        def element(j: tirx.Var, i: tirx.Var) -> tirx.Expr:
            shift = (i % self.form.fields * 4).astype(self.form.word)
            bits = words[j, i // self.form.fields] >> shift & tirx.const(15, self.form.word)
            power = tirx.reinterpret("float32", bits_of(scales[j, i // 32]))
            return self.number(bits.astype("int32")) * power

        sizes = int(words.shape[0]), int(words.shape[1]) * self.form.fields
        shape = [tirx.IntImm("int64", size) for size in sizes]
        return te.compute(shape, element, "decoded")

    def emit(self, bb: relax.BlockBuilder, given: list[relax.Var], n: int, k: int) -> relax.Var:
        return bb.emit(bb.call_te(self.function, *given, primfunc_name_hint="decode"))


@pytest.mark.parametrize("word", ["uint8", "uint32"])
@pytest.mark.parametrize("number", [by_exponent, by_choices, without_subnormal, infinite])
def test_what_is_recognised(number: Number, word: str) -> None:
    form = Written(number, word)
    given = [te.placeholder(shape, dtype) for shape, dtype in form.shapes(N, K)]
    found = packed_format(te.create_prim_func([*given, form.function(*given)]))
    if number in (without_subnormal, infinite):
        assert found is None
    else:
        assert found is not None and (found.form, found.transposed) == (form.form, False)


@pytest.mark.parametrize("more", [0.0, 0.5])
def test_a_choice_of_two_numbers(more: float) -> None:
    """It has no scales, which factors of products alone may be."""
    words = te.placeholder((N, K // 2), "uint8")

    def element(j: tirx.Var, i: tirx.Var) -> tirx.Expr:
        byte = words[j, i // 2]
        number = by_exponent((byte >> (i % 2 * 4).astype("uint8") & 15).astype("int32"))
        return tirx.Select(byte > 7, number, number + more if more else number)

    shape = [tirx.IntImm("int64", size) for size in (N, K)]
    found = packed_format(te.create_prim_func([words, te.compute(shape, element)]))
    assert (found is None) == bool(more)


def matmul(rows: int) -> tvm.IRModule:
    """A matmul, with a residual."""
    bb = relax.BlockBuilder()
    layer = Layer(bb, Written(by_exponent))
    x, packed = layer.param((rows, K), "float32"), layer.packed(N, K)
    other = layer.param((rows, N), "float32")
    add_function(
        bb, "main", layer, lambda: [relax.op.add(projected(layer, x, packed, N, K), other)]
    )
    return bb.get()


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_matmuls_read_it(rows: int) -> None:
    report = Report()
    options = {"validate": "strict", "always_fuse": True, "report": report}
    run = machine(
        quickly(matmul(rows), relax.get_pipeline("relax_fusion", target="llvm", **options))
    )
    assert [d.spelling for d in report.fused] == ["matmul NT packed residual"], report.text()
    assert all("not checked" not in d.validation for d in report.fused)
    rng = np.random.default_rng(rows)
    x, other = (rng.standard_normal((rows, n)).astype("float32") for n in (K, N))
    words = rng.integers(0, 256, (N, K // 2), "uint8")
    scales = rng.integers(120, 128, (N, K // 32), "uint8")
    given = map(tvm.runtime.tensor, (x, words, scales, other))
    (got,) = run["main"](*given)
    wanted = x.astype("float64") @ decoded(MXFP4, (words, scales), (N, K)).T + other
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_the_least_and_the_largest_scale() -> None:
    """They are 2 ** -127 and NaN to all that decode them, also where a graph has 0 and infinity."""
    words, scales = np.full((N, K // 2), 0x11, "uint8"), np.full((N, K // 32), 127, "uint8")
    scales[:3], scales[3, 1] = np.array([[0], [1], [254]]), 255
    exact = np.ldexp(0.5, scales.astype("int32") - 127).repeat(32, 1)
    exact[3, 32:64] = np.nan
    np.testing.assert_array_equal(decoded(MXFP4, (words, scales), (N, K)), exact)
    np.testing.assert_array_equal(dequantize(words, scales, "mxfp4").astype("float64"), exact)
    blocks = words.reshape(N, K // 32, 16)
    np.testing.assert_array_equal(stored_decoded(blocks, scales), exact.astype("float32"))
    again = quantize(exact.astype("float32"), "mxfp4")
    np.testing.assert_array_equal(dequantize(*again, "mxfp4").astype("float64"), exact)
    run = machine(
        quickly(matmul(1), relax.get_pipeline("relax_fusion", target="llvm", always_fuse=True))
    )
    x, other = np.full((1, K), 2.0**-9, "float32"), np.zeros((1, N), "float32")
    (got,) = run["main"](*map(tvm.runtime.tensor, (x, words, scales, other)))
    np.testing.assert_allclose(got.numpy(), x.astype("float64") @ exact.T, rtol=1e-5, atol=2**-148)
    got = run["main"](*map(tvm.runtime.tensor, (x * np.float32(2.0**100), words, scales, other)))
    small = got[0].numpy()[0, 0]
    assert small == pytest.approx(K * 2.0 ** (100 - 9 - 128), rel=1e-5)


@pytest.mark.parametrize("least, largest", [(0.0, np.inf), (2.0**-127, np.nan), (0.0, 1.0)])
def test_how_a_scale_is_written(least: float, largest: float) -> None:
    """A byte is shifted to the exponent, and a choice may mend what that makes of its ends."""

    def power(byte: tirx.Expr) -> tirx.Expr:
        bits = shifted(byte)
        for value, end in ((0, least), (255, largest)):
            at = tirx.const(int(np.float32(end).view("uint32")), "uint32")
            bits = tirx.Select(byte == tirx.const(value, "uint8"), at, bits)
        return bits

    form = Written(by_exponent)
    given = [te.placeholder(shape, dtype) for shape, dtype in form.shapes(N, K)]
    found = packed_format(te.create_prim_func([*given, form.function(*given, power)]))
    assert (found is not None) == (largest != 1.0)


def test_a_gpu_decodes_it_in_a_matmul_of_its_own() -> None:
    report = Report()
    mod = lowered(matmul(1), "h200", phases=2, report=report, always_fuse=True)
    kernels = [call.args[0].name_hint for call in called(mod["main"])]
    assert len(kernels) == 1 and not report.fused
    assert any("numbers of 4 bits" in d.decline.detail for d in report.declined)


def test_the_nearest_number_of_each_group() -> None:
    w = np.random.default_rng(3).standard_normal((N, K)).astype("float32")
    w[0, :32], w[1, 32:64] = 0, np.nan
    words, scales = quantize(w, "mxfp4")
    assert (words.shape, scales.shape, scales.dtype) == ((N, K // 2), (N, K // 32), "uint8")
    assert [*zip(*np.where(scales == 255), strict=True)] == [(1, 1)]
    w[1, 32:64] = 0
    words, scales = quantize(w, "mxfp4")
    got = dequantize(words, scales, "mxfp4").astype("float32")
    unit = np.exp2(scales.astype("float32") - 127).repeat(32, axis=1)
    numbers = np.arange(16, dtype="uint8").view(ml_dtypes.float4_e2m1fn).astype("float32")
    nearest = np.abs(w[..., None] / unit[..., None] - numbers).min(-1)
    np.testing.assert_array_equal(np.abs(w - got) / unit, nearest)
    largest = np.abs(w / unit).reshape(N, -1, 32).max(-1)
    assert ((largest >= 4) & (largest < 8))[1:, 0].all()
    again = quantize(got, "mxfp4")
    np.testing.assert_array_equal(dequantize(*again, "mxfp4").astype("float32"), got)
