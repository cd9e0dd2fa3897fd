"""Generic matmuls of integers, and of float32 as tf32: who takes them, and the code of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tvm import relax
from tvm.relax import op
from tvm.target import Target

from relax_fusion.dlight_rules import GenericMatmulRule
from relax_fusion.errors import Decline, Reason
from relax_fusion.estimator.registry import table_of
from relax_fusion.estimator.tile_plan import PLAN_ATTR
from relax_fusion.hardware.target import make_target

from ..support.generic_cases import Input, compiled, fused

Case = tuple[list[Input], Callable[..., relax.Expr]]


def product(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return op.matmul(x, w, out_dtype="int32")


def scaled(x: relax.Expr, w: relax.Expr, columns: relax.Expr, rows: relax.Expr) -> relax.Expr:
    total = op.astype(product(x, op.permute_dims(w)), "float32")
    return op.astype(op.multiply(op.multiply(total, columns), rows), "float16")


def requantised(x: relax.Expr, w: relax.Expr, scale: relax.Expr) -> relax.Expr:
    value = op.round(op.multiply(op.astype(product(x, w), "float32"), scale))
    return op.astype(op.clip(value, -128, 127), "int8")


def integers(*shapes: tuple, dtype: str = "int8") -> list[Input]:
    return [Input(shape, dtype) for shape in shapes]


TAKEN: dict[str, tuple[list[Input], Callable[..., relax.Expr], str]] = {
    "nk": (
        integers((77, 96), (40, 96)),
        lambda x, w: product(x, op.permute_dims(w)),
        "*(int4*)(out0_ptr",
    ),
    "kn": (integers((77, 96), (96, 40)), product, "prmt.b32"),
    "scaled": (
        [*integers(("b", "s", 128), (256, 128)), Input((256,)), Input(("b", "s", 1))],
        scaled,
        "*(uint4*)(out0_ptr",
    ),
    "requantised": (
        [*integers((40, 256), (256, 512)), Input((512,))],
        requantised,
        "*(int2*)(out0_ptr",
    ),
    "batch": (integers(("b", 40, 64), ("b", 64, 32)), product, "blockIdx.z"),
    "uint8": (integers((77, 96), (96, 40), dtype="uint8"), product, "s32.u8.u8.s32"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_tensor_cores_multiply_integers(name: str) -> None:
    inputs, emit, text = TAKEN[name]
    kernel = GenericMatmulRule().apply(fused(inputs, emit), make_target("h200"), False).mod["main"]
    plans = table_of(kernel.attrs[PLAN_ATTR])
    assert {plan.family or plan.block_m for _, plan in plans.entries} <= {"mma", "wgmma", 1}
    assert text in compiled(kernel, make_target("h200")).mod.imports[0].inspect_source()


LEFT: dict[str, tuple[Case, Any, str]] = {
    "an odd depth": (
        (integers((77, 97), (40, 97)), lambda x, w: product(x, op.permute_dims(w))),
        "h200",
        "copied 4 bytes at least at once, along 97 elements",
    ),
    "odd columns": ((integers((77, 96), (96, 41)), product), "h200", "along 96, 41 elements"),
    "a CPU": (
        (integers((77, 96), (96, 40)), product),
        {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a53"},
        "has no instruction that adds up its products",
    ),
    "an older GPU": (
        (integers((77, 96), (96, 40)), product),
        {"kind": "cuda", "arch": "sm_75", "model": "rtx3080"},
        "(CUDA, sm_80 or newer)",
    ),
    "a batch of computed weights": (
        (
            [Input((3, 33, 96), "int8"), Input((3, 96, 40))],
            lambda x, w: product(x, op.astype(w, "int8")),
        ),
        "h200",
        "int8 that is computed first is not for a batch",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_integers_are_left_with_a_reason(name: str) -> None:
    (inputs, emit), target, reason = LEFT[name]
    target = make_target(target) if isinstance(target, str) else Target(target)
    found = GenericMatmulRule().attempt(fused(inputs, emit), target)
    assert isinstance(found, Decline) and found.reason == Reason.NO_PLAN
    assert reason in found.detail


def test_sums_that_overflow_are_left() -> None:
    func = fused(integers((77, 96), (96, 40)), op.matmul)  # in int8
    assert GenericMatmulRule().attempt(func, make_target("h200")) is None


@pytest.mark.parametrize("target", ["h200", "llvm"])
def test_float32_is_multiplied_as_tf32_on_request_only(target: str) -> None:
    func = fused([Input((77, 96)), Input((96, 40))], op.matmul)
    for allowed in (False, True):
        kernel = GenericMatmulRule(allowed).apply(func, make_target(target), False).mod["main"]
        assert ("tf32" in kernel.script()) == (allowed and target == "h200")
