"""One kernel of each family as text, so that a change of a kernel is seen in a diff.

``RELAX_FUSION_REWRITE=1 python -m pytest tests/test_kernel_texts.py`` writes the texts anew.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tvm.target import Target

from relax_fusion import cuda_kernels, make_target
from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules import FusedRule
from relax_fusion.estimator import violations
from relax_fusion.estimator.families.cpu_generated.family import CpuChainPlan
from relax_fusion.estimator.families.cuda_matmul.tiles import CudaPlan
from relax_fusion.estimator.families.few_rows.packed import PackedPlan
from relax_fusion.estimator.families.generated.plan import GeneratedPlan
from relax_fusion.estimator.families.triton_attention.tiles import AttentionPlan
from relax_fusion.estimator.families.triton_experts import ExpertPlan
from relax_fusion.estimator.registry import FAMILIES, family_of
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import device_of
from relax_fusion.launch.arguments import Out, TensorMap, Workspace
from relax_fusion.triton_bridge.launches import AnyStep, SourceStep
from relax_fusion.workload import (
    Chain,
    DynamicDim,
    ExpertMatmul,
    Gate,
    Norm,
    NormMatmul,
    Packed,
    Projection,
    Workload,
)

from .support.estimator_cases import attention
from .support.launches import launch_cases, parameters
from .support.matmul_chains import TwoMatmuls

TEXTS = Path(__file__).parent / "data" / "kernels"
CPU = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell", "num-cores": 2})
ZEN4 = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "znver4", "num-cores": 2})
RMS = Norm("rms", 1e-5)
ROWS = DynamicDim("rows")
CACHED = {"causal": "bottom_right", "kv_prefix": True}


def matmul(
    rows: int | DynamicDim, k: int, n: int, norm: Norm | None = RMS, dtype: str = "float16"
) -> NormMatmul:
    return NormMatmul(rows, k, (Projection(n, "nk", ("bias",)),), norm, dtype, dtype)


def chain(rows: int, sizes: tuple[int, int, int], dtype: str) -> Chain:
    return TwoMatmuls(rows, *sizes, ("nk", "nk"), (), ("residual",), dtype, dtype).chain


SMALL = attention(1, 16, 16, (1, 1), (16, 16))
DYNAMIC = attention(1, *map(DynamicDim, ("q_len", "kv_len")), (8, 2), (64, 64), **CACHED)
PACKED = NormMatmul(
    *(2, 1024, (Projection(16, "nk", packed=Packed(4, 32, 7)),), RMS), *("float16", "float16")
)
TIR: dict[str, tuple[str | Target, Workload, TilePlan]] = {
    "Experts": (
        *(CPU, ExpertMatmul(2, 4, 2, 32, 16, "nk", "float16", "float16", bias=True, gate=Gate())),
        TilePlan(1, 16, 32, lanes=8, family="experts"),
    ),
    "DotProducts": (
        *("a100", matmul(1, 256, 16, dtype="float32")),
        TilePlan(1, 2, 128, lanes=4, num_warps=2, family="dot_products"),
    ),
    "FewRows": (
        *("a100", matmul(2, 1024, 16)),
        TilePlan(8, 16, 256, 8, 16, 8, num_stages=2, num_warps=4, family="few_rows"),
    ),
    "PackedRows": (
        *("h200", PACKED),
        PackedPlan(
            *(8, 16, 512, 8, 16, 8), num_stages=2, num_warps=4, family="packed_rows", keeps_row=True
        ),
    ),
    "PackedRows-streamed": (
        *("h200", replace(PACKED, rows=1)),
        PackedPlan(
            *(8, 16, 2048, 8, 16, 8),
            num_stages=2,
            num_warps=4,
            family="packed_rows",
            keeps_row=True,
            residents=4,
        ),
    ),
    "TensorCores": (
        *("a100", matmul(64, 64, 64, None)),
        TilePlan(64, 64, 32, 32, 32, 8, num_stages=2, num_warps=4, family="mma"),
    ),
    "FmaTiles": (
        "a100",
        matmul(4, 64, 32),
        TilePlan(2, 32, 32, lanes=8, num_warps=2, family="fma_tiles"),
    ),
    "FmaAttention": ("a100", SMALL, TilePlan(2, 16, 16, num_warps=1, family="fma_attention")),
    "CpuTiles": (CPU, matmul(1, 256, 32), TilePlan(1, 1, 256, lanes=8, family="cpu_tiles")),
    "Words": (
        *(CPU, replace(PACKED, k=64, dtype="float32", out_dtype="float32")),
        TilePlan(2, 4, 64, 2, 4, 8, family="words"),
    ),
    "CpuTiles-panels": (
        *(CPU, matmul(1, 64, 32, None)),
        TilePlan(5, 16, 64, 5, 16, 8, family="panels"),
    ),
    "CpuTiles-dots": (
        *(ZEN4, matmul(1, 64, 32, None, "bfloat16")),
        TilePlan(7, 32, 64, 7, 32, 16, family="dots"),
    ),
    "CpuTiles-fours": (
        *(ZEN4, replace(matmul(1, 64, 32, None, "int8"), out_dtype="float32")),
        TilePlan(7, 32, 64, 7, 32, 16, family="mixed_fours"),
    ),
    "CpuAttention": (
        *(CPU, attention(1, 4, 8, (1, 1), (8, 8), dtype="float32")),
        TilePlan(1, 16, 8, reg_n=8, lanes=8, family="cpu_attention"),
    ),
    "CpuGenerated": (
        *(CPU, chain(20, (16, 32, 16), "float32")),
        CpuChainPlan(
            *(16, 16, 32),
            lanes=8,
            family="cpu_generated",
            expression="ij0kj1",
            tiles="i=16 j0=32 k=16 j1=16",
        ),
    ),
    "CpuProducts": (
        *(CPU, chain(4, (16, 8, 16), "float32")),
        TilePlan(2, 4, 16, reg_m=2, reg_n=4, lanes=8, family="cpu_products"),
    ),
}
"""By family: a small workload, and a plan of small tiles."""


def plan(family: str, *block: int, **fields: int) -> TilePlan:
    return TilePlan(*block, family=family, **{"num_warps": 4, **fields})


EPILOGUE = Projection(64, "nk", ("bias", "gelu", 0.5, "residual"))
TRITON: dict[str, tuple[Workload, list[TilePlan]]] = {
    "CudaMatmul": (
        NormMatmul(ROWS, 256, (EPILOGUE,), None, "float16", "float16"),
        [CudaPlan.of(plan("cuda", 16, 64, 64, num_stages=3, num_warps=8, split_k=2))],
    ),
    "TritonMatmul": (
        matmul(ROWS, 256, 64),
        [plan("gemv", 1, 2, 256), plan("pointer", 16, 64, 64, num_stages=3, split_k=2)],
    ),
    "PackedGemv": (
        NormMatmul(
            ROWS, 256, (replace(EPILOGUE, packed=Packed(4, 32, 7)),), None, "float16", "float16"
        ),
        [plan("packed_gemv", 2, 4, 256)],
    ),
    "TritonAttention": (
        DYNAMIC,
        [
            plan("attention", 16, 64, 64, split_k=4, num_stages=2),
            plan("flash", 128, 128, 64, num_stages=2, num_warps=12),
            AttentionPlan(16, 64, 64, groups=8, num_warps=8, family="groups"),
            AttentionPlan(*(64, 128, 64), groups=2, num_stages=2, num_warps=8, family="halves"),
        ],
    ),
    "TritonExperts": (
        ExpertMatmul(
            *(ROWS, 4, 2, 32, 16, "nk", "float16", "float16"),
            each=True,
            bias=True,
            share="float32",
            residual=True,
        ),
        [
            ExpertPlan(1, 4, 256, num_warps=1, family="expert_pairs"),
            ExpertPlan(16, 64, 64, num_stages=4, num_warps=4, family="expert_tiles"),
        ],
    ),
    "Generated": (
        TwoMatmuls(
            ROWS, 64, 256, 64, ("kn", "nk"), ("gelu",), ("bias",), "float16", "float16"
        ).chain,
        [
            GeneratedPlan(
                *(64, 64, 128),
                num_stages=3,
                num_warps=4,
                family="generated",
                expression="ij0kj1",
                tiles="i=64 j0=64 k=64 j1=64",
                split="j0=2",
                tensor_maps=1,
            )
        ],
    ),
}
"""By family: a workload, and a plan for each of its kernels."""


def scheduled(target: str | Target, work: Workload, plan: TilePlan) -> str:
    """Return the PrimFunc that a rule of ours makes."""
    func = build_prim_func(work, PlanTable.single(plan))
    target = make_target(target) if isinstance(target, str) else target
    made = FusedRule().apply(func, target, False).mod["main"]
    for attr in {*dict(func.attrs)} & {*dict(made.attrs)}:
        made = made.without_attr(attr)
    return made.script(show_meta=False)


def launched(work: Workload, plan: TilePlan) -> Iterator[str]:
    """Yield the launches of a plan: kernel, grid, arguments, constants, options."""
    params = parameters(work)
    workspaces: list[Workspace] = []

    def shown(value: Any) -> str:
        if isinstance(value, Workspace):
            if not any(value is w for w in workspaces):
                workspaces.append(value)
            number = next(i for i, w in enumerate(workspaces) if w is value)
            return f"workspace{number}, {value.dtype} [{', '.join(map(shown, value.shape))}]"
        if isinstance(value, Out):
            return f"out{value.index}"
        if hasattr(value, "_fields"):
            fields = value._asdict().items()
            return f"({', '.join(f'{n} {shown(v)}' for n, v in fields if v is not None)})"
        if isinstance(value, tuple):
            return f"({', '.join(map(shown, value))})"
        if isinstance(value, TensorMap):
            return f"tiles {list(value.block)} of {shown(value.of)}"
        return re.sub(r"T\.int64\((-?\d+)\)", r"\1", str(value))

    yield f"# {plan.text}"
    for when, steps in launch_cases(work, plan, params):
        yield "otherwise:" if when is True else f"if {shown(when)}:"
        for step in steps:
            yield from launch_text(step, shown)


def launch_text(step: AnyStep, shown: Callable[[Any], str]) -> Iterator[str]:
    """Yield kernel, grid, arguments, constants and options of a launch, by what shows values."""
    if isinstance(step, SourceStep):
        name, options, given = step.source.entry, step.source.options, [dict(enumerate(step.args))]
    else:
        name, options, given = step.function.__name__, step.options, [step.args, step.constexprs]
    yield f"    {name} on [{', '.join(map(shown, step.grid))}]"
    for named in (*given, asdict(options)):
        text = "; ".join(f"{n} = {shown(v)}" for n, v in named.items())
        yield textwrap.indent(textwrap.fill(text, 90), " " * 8)
    if isinstance(step, SourceStep):
        yield own_text(step.source.text)


def own_text(source: str) -> str:
    """Return a kernel in CUDA C++ with the names of files in the place of what they have."""
    for path in sorted(Path(cuda_kernels.__file__).parent.glob("*.cu")):
        assert source.count(path.read_text()) <= 1
        source = source.replace(path.read_text(), f"// here stands {path.name}\n")
    assert "// here stands matmul.cu" in source
    return source


def text_of(family: str) -> str:
    if family in TIR:
        return scheduled(*TIR[family])
    work, plans = TRITON[family]
    return "\n".join(line for plan in plans for line in launched(work, plan))


@pytest.mark.parametrize("family", [*TIR, *TRITON])
def test_kernel(family: str) -> None:
    path, text = TEXTS / f"{family}.txt", text_of(family).rstrip() + "\n"
    if os.environ.get("RELAX_FUSION_REWRITE"):
        path.write_text(text)
    assert text == path.read_text()


def test_every_family_has_a_text() -> None:
    names = {type(f).__name__ for f in FAMILIES}
    assert names == {name.partition("-")[0] for name in (*TIR, *TRITON)}
    assert {*TIR, *TRITON} == {p.stem for p in TEXTS.iterdir()}
    for name, (target, work, plan) in TIR.items():
        dev = device_of(make_target(target) if isinstance(target, str) else target)
        assert type(family_of(plan)).__name__ == name.partition("-")[0]
        assert not any(violations(plan, work, dev)), name
    for _, plans in TRITON.values():
        families = {family_of(p) for p in plans}
        assert [p.family for p in plans] == [*families.pop().names]
