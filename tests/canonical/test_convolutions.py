"""MultiplyConvolutions: convolutions as matmuls, compared with their definition."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import ir, relax, tirx

import relax_fusion
from relax_fusion.canonical import MoveReshapes, MoveTransposes, MultiplyConvolutions

from ..support.quick import machine, quick_host, quickly
from .common import SIZES, computed, drawn, module, operators

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "Whisper's first": ((2, 3, 9), (4, 3, 3), {"padding": 1}),
    "Whisper's second": ((2, 3, 9), (4, 3, 3), {"padding": 1, "strides": 2}),
    "patches": ((2, 3, 8, 4), (4, 3, 4, 4), {"strides": 4}),
    "patches with a rest": ((1, 3, 9, 7), (4, 3, 4, 4), {"strides": 4}),
    "one element": ((2, 3, 4, 5), (4, 3, 1, 1), {}),
    "every second element": ((2, 3, 5, 4), (4, 3, 1, 1), {"strides": 2}),
    "one element and zeros around": ((1, 3, 4), (4, 3, 1), {"padding": 1}),
    "zeros on one side": ((1, 3, 6), (4, 3, 3), {"padding": (2, 0)}),
    "other sides": (
        (1, 2, 5, 6),
        (3, 2, 3, 2),
        {"padding": (0, 1, 2, 0), "strides": (2, 1), "dilation": (1, 2)},
    ),
    "dilation": ((1, 3, 11), (4, 3, 3), {"dilation": 3, "padding": 3}),
    "groups": ((2, 6, 7), (4, 3, 3), {"groups": 2, "padding": 1}),
    "groups in a plane": ((2, 4, 5, 3), (6, 2, 2, 2), {"groups": 2}),
    "groups of one element": ((2, 4, 5), (6, 2, 1), {"groups": 2}),
    "channels last": (
        (2, 5, 6, 3),
        (3, 2, 3, 4),
        {"data_layout": "NHWC", "kernel_layout": "HWIO", "padding": 1},
    ),
    "channels last, and of the kernel": (
        (2, 9, 3),
        (4, 3, 3),
        {"data_layout": "NWC", "kernel_layout": "OWI"},
    ),
    "result channels last": ((2, 3, 5, 6), (4, 3, 2, 2), {"out_layout": "NHWC"}),
    "space": ((1, 2, 4, 5, 3), (3, 2, 2, 3, 1), {"padding": (1, 0, 0, 0, 0, 1)}),
}


def convolution(shape: Any, kernel: Any, attrs: dict[str, Any], dtype: str = "") -> ir.IRModule:
    """Return ``main(x, w)``, a convolution."""
    dtype, builder = dtype or "float32", relax.BlockBuilder()
    x, w = (relax.Var(n, relax.TensorType(s, dtype)) for n, s in (("x", shape), ("w", kernel)))
    operator = getattr(relax.op.nn, f"conv{len(kernel) - 2}d")
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = builder.emit_output(operator(x, w, **attrs))
        builder.emit_func_output(y)
    return builder.get()


def defined(call: relax.Call, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return what a convolution is: for each element of the kernel, a product of matrices."""
    attrs, rank = call.attrs, x.ndim - 2
    space = [letter for letter in attrs.data_layout if letter not in "NC"]
    x = x.transpose([attrs.data_layout.index(letter) for letter in ("N", "C", *space)])
    w = w.transpose([attrs.kernel_layout.index(letter) for letter in ("O", "I", *space)])
    padding = [int(p) for p in attrs.padding]
    x = np.pad(x, [(0, 0), (0, 0), *zip(padding[:rank], padding[rank:], strict=True)])
    strides, dilation = map(int, attrs.strides), [int(d) for d in attrs.dilation]
    spans = [d * (r - 1) + 1 for d, r in zip(dilation, w.shape[2:], strict=True)]
    every = [slice(0, n - s + 1, t) for n, s, t in zip(x.shape[2:], spans, strides, strict=True)]
    groups, y = int(attrs.groups), 0
    for at in itertools.product(*map(range, w.shape[2:])):
        first = [a * d for a, d in zip(at, dilation, strict=True)]
        places = [slice(f, s.stop + f, s.step) for f, s in zip(first, every, strict=True)]
        parts = np.split(x[(..., *places)], groups, 1), np.split(w[(..., *at)], groups)
        product = [np.einsum("nc...,oc->no...", *pair) for pair in zip(*parts, strict=True)]
        y = y + np.concatenate(product, 1)
    return y.transpose([("N", "C", *space).index(letter) for letter in attrs.out_layout])


def call_in(mod: ir.IRModule) -> relax.Call:
    (block,) = mod["main"].body.blocks
    return block.bindings[0].value


@pytest.mark.parametrize("case", CASES)
def test_numbers(case: str) -> None:
    before = convolution(*CASES[case])
    after = MultiplyConvolutions()(before)
    relax.analysis.well_formed(after)  # raises
    assert operators(after).count("matmul") == 1 and not [
        o for o in operators(after) if "conv" in o
    ]
    want = defined(call_in(before), *drawn(before, {}).values())
    np.testing.assert_allclose(computed(after, {}), want, rtol=1e-9, atol=1e-9)
    assert MultiplyConvolutions()(after).same_as(after)


@pytest.mark.parametrize("case", [case for case, (x, _, _) in CASES.items() if len(x) < 5])
def test_symbolic_sizes(case: str) -> None:
    shape, kernel, attrs = CASES[case]
    layout = attrs.get("data_layout", "NCHW"[: len(shape)])
    sizes = {"N": tirx.Var("b", "int64"), "H": tirx.Var("s", "int64"), "W": tirx.Var("s", "int64")}
    shape = tuple(sizes.get(letter, n) for letter, n in zip(layout, shape, strict=True))
    before = convolution(shape, kernel, attrs)
    after = MultiplyConvolutions()(before)
    assert "matmul" in operators(after)
    for b, s in SIZES:
        symbols = {"b": b, "s": s + 6}
        want = defined(call_in(before), *drawn(before, symbols).values())
        np.testing.assert_allclose(computed(after, symbols), want, rtol=1e-9, atol=1e-9)


def test_one_element_is_not_copied() -> None:
    after = MultiplyConvolutions()(convolution(*CASES["one element"]))
    assert "call_tir" not in operators(after)


def test_the_dtype_of_the_result_is_kept() -> None:
    before = convolution((1, 3, 6), (4, 3, 3), {"out_dtype": "float32"}, "float16")
    after = MultiplyConvolutions()(before)
    assert "matmul" in operators(after)
    tvm.ir.assert_structural_equal(after["main"].ret_ty, before["main"].ret_ty)


KEPT: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], str]] = {
    "channels by themselves": ((1, 4, 6), (4, 1, 3), {"groups": 4}, ""),
    "integers": ((1, 4, 6), (4, 4, 3), {"out_dtype": "int32"}, "int8"),
    "inputs in front": ((1, 4, 6), (4, 3, 3), {"kernel_layout": "IOW"}, ""),
    "groups behind": (
        (1, 6, 4),
        (3, 2, 4),
        {"data_layout": "NWC", "kernel_layout": "WIO", "groups": 2},
        "",
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_stays(case: str) -> None:
    before = convolution(*KEPT[case])
    assert MultiplyConvolutions()(before).same_as(before)


def test_sizes_of_the_kernel_are_unknown() -> None:
    before = convolution((1, 4, 6), (tirx.Var("n", "int64"), 4, 3), {})
    assert MultiplyConvolutions()(before).same_as(before)


STEM = """
a = R.nn.conv1d(x, w, padding=[1])
c = R.nn.gelu(R.add(a, R.reshape(d, R.shape([1, 8, 1]))))
e = R.nn.conv1d(c, v, strides=[2], padding=[1])
f = R.nn.gelu(R.add(e, R.reshape(d, R.shape([1, 8, 1]))))
y = R.permute_dims(f, axes=[0, 2, 1])
"""
STEM_PARAMS = (
    "x: R.Tensor(('b', 4, 's'), '{0}'), w: R.Tensor((8, 4, 3), '{0}'), "
    "v: R.Tensor((8, 8, 3), '{0}'), d: R.Tensor((8,), '{0}')"
)


def test_a_convolution_reads_the_rows_of_another() -> None:
    before = module(STEM_PARAMS.format("float32"), STEM)
    after = tvm.transform.Sequential([MultiplyConvolutions(), MoveReshapes(), MoveTransposes()])
    found = operators(after(before))
    assert found.count("permute_dims") == 2  # of the weights
    assert found.count("call_tir") == found.count("matmul") == found.count("nn.gelu") == 2


def test_patches_become_rows_without_a_copy() -> None:
    before = module(
        "x: R.Tensor(('b', 3, 8, 4), 'float32'), w: R.Tensor((6, 3, 4, 4), 'float32'), "
        "d: R.Tensor((6,), 'float32')",
        "a = R.nn.conv2d(x, w, strides=[4, 4])\nc = R.add(a, R.reshape(d, R.shape([1, 6, 1, 1])))\n"
        "e = R.reshape(c, R.shape([b, 6, 2]))\ny = R.permute_dims(e, axes=[0, 2, 1])",
    )
    after = tvm.transform.Sequential([MultiplyConvolutions(), MoveReshapes()])(before)
    assert [o for o in operators(after) if o != "reshape"] == [
        *("call_tir", "permute_dims", "matmul", "add")
    ]
    x, w, d = drawn(before, {"b": 2}).values()
    want = defined(call_in(before), x, w).reshape(2, 6, 2) + d[:, None]
    np.testing.assert_allclose(computed(after, {"b": 2}), want.transpose(0, 2, 1), rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_fused_with_bias_and_activation(dtype: str) -> None:
    mod, report = module(STEM_PARAMS.format(dtype), STEM), relax_fusion.Report()
    target = quick_host()
    pipeline = relax.get_pipeline("relax_fusion", target=target, report=report)
    vm = machine(quickly(mod, pipeline, target))
    (coverage,) = report.coverage
    assert coverage.chains["projection -> activation"] == (2, 2)
    sizes = {"b": 2, "s": 7}
    arrays = {name: a.astype(dtype) for name, a in drawn(mod, sizes).items()}
    got = vm["main"](*map(tvm.runtime.tensor, arrays.values())).numpy()
    wide = {name: a.astype("float64") for name, a in arrays.items()}
    exact = computed(MultiplyConvolutions()(mod), sizes, inputs=wide)
    step = np.finfo(dtype).eps
    np.testing.assert_allclose(got, exact, rtol=4 * step, atol=step * abs(exact).max())
