"""Kernels of matmuls by experts: every field of the workload, at sizes that nothing divides."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import tvm
from tvm import ir

from relax_fusion import make_target
from relax_fusion.compute import build_prim_func
from relax_fusion.estimator import candidates
from relax_fusion.estimator.tile_plan import PlanTable
from relax_fusion.hardware.target import device_of
from relax_fusion.mlc.repairs import RunThreadsInTurn
from relax_fusion.options import make_options
from relax_fusion.pipeline import schedule_kernels
from relax_fusion.quantization import MXFP4
from relax_fusion.workload import ACTIVATIONS, DynamicDim, ExpertMatmul, Gate, Packed

from ..support.contraction_cases import Case
from ..support.quick import loaded, quick_host, quickly

COUNT = 40


def gate(dice: Random) -> Gate:
    """Draw what becomes of two columns."""
    clipped = [dice.choice([None, None, (-0.4, 0.5)]) for _ in range(2)]
    sharpness = dice.choice([None, None, 1.3])
    named = dice.choice(ACTIVATIONS) if sharpness is None else "silu"
    turns = dice.random() < 0.4, dice.random() < 0.6
    return Gate(named, *turns, sharpness, *clipped, dice.choice([0.0, 0.0, 1.0]))


def case(seed: int) -> Case:
    """Draw a workload; numbers of experts are up to 8, whether there are so many or not."""
    dice = Random(seed)
    rows, experts = dice.choice([1, 2, 5, 17]), dice.choice([1, 3, 8])
    dtype = dice.choice(["float32", "float32", "float16", "bfloat16"])
    gated, share = dice.random() < 0.5, dice.choice(["", "", "float32", dtype])
    layout, packed = dice.choice(["nk", "kn"]), None
    k, n = dice.choice([1, 7, 16, 40, 48]), dice.choice([1, 5, 16, 24, 33])
    if dice.random() < 0.25:
        layout, packed = "nk", Packed(dice.choice([4, 8]), 32, 7, scale_dtype=dtype)
        packed = MXFP4 if dice.random() < 0.4 else packed
    work = ExpertMatmul(
        *(DynamicDim("n") if dice.random() < 0.4 else rows, experts, dice.randint(1, experts)),
        *(k, n, layout, dtype, dice.choice([dtype, dtype, "float32"])),
        each=dice.random() < 0.5,
        ids_dtype=dice.choice(["int32", "int64"]),
        bias=dice.random() < 0.4,
        activation="" if gated or dice.random() < 0.5 else dice.choice(ACTIVATIONS),
        gate=gate(dice) if gated else None,
        share=share,
        residual=bool(share) and dice.random() < 0.5,
        packed=packed,
    )
    return Case(f"{seed}: {work}", work, rows)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["llvm", "a100"])
def library(request: pytest.FixtureRequest) -> tvm.runtime.Module:
    """The kernels of all cases, compiled together; blocks and threads of a GPU are loops."""
    host, gpu, functions = quick_host(), request.param == "a100", {}
    target = make_target("a100") if gpu else host
    for seed in range(COUNT):
        work = case(seed).work
        plan = Random(seed).choice([*candidates(work, device_of(target), "tir")])
        func = build_prim_func(work, PlanTable.single(plan))
        functions[f"f{seed}"] = func.with_attr("global_symbol", f"f{seed}")
    mod = schedule_kernels(make_options(target, {"backend": "tir"}))(ir.IRModule(functions))
    if gpu:
        mod = RunThreadsInTurn()(mod)
    return loaded(quickly(mod, target=host))


@pytest.mark.parametrize("seed", range(COUNT))
def test_numbers(library: tvm.runtime.Module, seed: int) -> None:
    one = case(seed)
    arrays = one.inputs()
    outs = [tvm.runtime.empty(shape, dtype) for shape, dtype in one.out_shapes()]
    library[f"f{seed}"](*map(tvm.runtime.tensor, arrays.values()), *outs)
    one.check(arrays, [np.asarray(out.numpy()) for out in outs])
