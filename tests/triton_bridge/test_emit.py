"""Fused PrimFuncs with Triton plans become launches."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import tvm
from tvm import ir, relax, tirx
from tvm.relax.frontend import nn

from relax_fusion import Report
from relax_fusion.errors import KernelError, LoweringError, PipelineError
from relax_fusion.estimator.registry import is_launched
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import make_target
from relax_fusion.launch.kernel import CompiledKernel
from relax_fusion.transforms.fixed_arguments import MarkFixedArguments
from relax_fusion.triton_bridge import EmitTritonKernels
from relax_fusion.triton_bridge.kernel import KernelSource
from relax_fusion.workload import Dim, DynamicDim, GatedFFN, Norm, NormMatmul, Projection, Rope

from ..support.triton_modules import module_of
from .common import kernels, launched

H200 = make_target("h200")
ROWS = DynamicDim("rows")
RMS = Norm("rms", 1e-5)
WORK = NormMatmul(ROWS, 256, (Projection(384, "nk", ("residual",)),), RMS, "float16", "float16")
GATED = GatedFFN(ROWS, 256, 192, "nk", True, False, "silu", RMS, "bfloat16", "bfloat16", bias=True)


def plan(family: str, *block: int, **fields: int) -> TilePlan:
    return TilePlan(*block, num_warps=4, family=family, **fields)


GEMV = plan("gemv", 1, 2, 256)
POINTER = plan("pointer", 16, 64, 64, num_stages=3)
SPLIT = replace(POINTER, split_k=2)
TALL = replace(POINTER, block_m=64)
MANY = replace(POINTER, block_m=128)


def emitted(work: NormMatmul | GatedFFN, plans: PlanTable, outputs: int = 1) -> ir.IRModule:
    passes = MarkFixedArguments(H200), EmitTritonKernels(H200)
    return tvm.transform.Sequential(passes)(module_of(work, plans, outputs=outputs))


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (GEMV, ["gemv"]),
        (POINTER, ["matmul_pointer"]),
        (TALL, ["row_norm", "matmul_pointer"]),
        (SPLIT, ["matmul_pointer", "split_reduce"]),
        (replace(TALL, split_k=2), ["row_norm", "matmul_pointer", "split_reduce"]),
    ],
)
@pytest.mark.parametrize("work", [WORK, GATED], ids=["norm_matmul", "gated"])
def test_launches_of_each_family(work, chosen: TilePlan, expected: list[str]) -> None:
    mod = emitted(work, PlanTable.single(chosen))
    assert launched(mod) == expected
    assert isinstance(mod["main"].ret_ty, relax.TensorType)


def test_calls_that_would_stay_are_refused() -> None:
    lower = [relax.transform.ToNonDataflow(), relax.transform.CallTIRRewrite()]
    lowered = tvm.transform.Sequential(lower)(module_of(WORK, PlanTable.single(GEMV), outputs=1))
    with pytest.raises(LoweringError, match=r"^main uses \w+, .*otherwise than by R.call_tir; run"):
        EmitTritonKernels(H200)(lowered)


ROPE = Rope(64, 256, "float32", DynamicDim("s"))


FAMILIES = [GEMV, POINTER, SPLIT, MANY]


def rotated(positions: Dim | None) -> NormMatmul:
    rope = replace(ROPE, positions=positions)
    return replace(WORK, outputs=(Projection(384, "nk", ("bias",), rope),))


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize("chosen", FAMILIES, ids=lambda p: p.family)
@pytest.mark.parametrize("positions", [None, 1, 7, DynamicDim("s")])
def test_heads_are_rotated_by_each_family(chosen: TilePlan, positions: Dim | None) -> None:
    work, table = rotated(positions), PlanTable.single(chosen)
    plain = replace(work, outputs=(replace(work.outputs[0], rope=None),))
    mod = emitted(work, table)
    assert launched(mod) == launched(emitted(plain, table))
    angles = [p.ty for p in mod["main"].params[-2:]]
    assert [str(ty.dtype) for ty in angles] == ["float32"] * 2
    assert [int(ty.shape.values[1]) for ty in angles] == [64, 64]


@pytest.mark.parametrize("chosen", FAMILIES, ids=lambda p: p.family)
@pytest.mark.parametrize("positions", [7, DynamicDim("s")])
def test_kernels_that_rotate_compile(chosen: TilePlan, positions: Dim) -> None:
    assert emitted(rotated(positions), PlanTable.single(chosen))


def constant(kernel: CompiledKernel, name: str) -> str:
    """Return one of a kernel's constants, those of `row_norm` by their own names."""
    found = dict(kernel.constants)
    return re.search(rf"\b{name}=(\w+)", found["C"])[1] if "C" in found else found[name.upper()]


def overlapping(mod: ir.IRModule) -> dict[str, set[bool]]:
    """Return by function whether kernels may begin before the one in front has ended.

    Each of those waits for it itself.
    """
    found = kernels(mod)
    for kernel in (k for several in found.values() for k in several):
        assert constant(kernel, "pdl") == str(kernel.options.dependent_launch)
    return {name: {k.options.dependent_launch for k in several} for name, several in found.items()}


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize("chosen", [GEMV, POINTER, SPLIT, TALL], ids=lambda p: p.family)
def test_launches_of_few_rows_overlap_from_the_first_on(chosen: TilePlan) -> None:
    for work in (WORK, replace(WORK, norm=None)):
        few = overlapping(emitted(work, PlanTable(((512, chosen), (None, MANY)))))
        many = overlapping(emitted(work, PlanTable.single(MANY)))
        own = launched(emitted(work, PlanTable.single(chosen)))
        assert all(True in few[name] for name in own) and set.union(*many.values()) == {False}


@pytest.mark.usefixtures("not_compiled")
def test_launches_of_many_rows_do_not_overlap() -> None:
    tiles = overlapping(emitted(WORK, PlanTable.single(replace(POINTER, block_m=64))))
    assert tiles == {"row_norm": {False}, "matmul_pointer": {False}}


def test_what_does_not_compile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(sources: Sequence[KernelSource], **_: object) -> list[CompiledKernel | KernelError]:
        return [KernelError(f"no {source.name}") for source in sources]

    monkeypatch.setattr("relax_fusion.triton_bridge.emit.try_kernels", failing)
    with pytest.raises(KernelError, match=r"^no gemv$"):
        emitted(WORK, PlanTable(((16, GEMV), (None, SPLIT))))


@pytest.mark.usefixtures("not_compiled")
def test_nothing_overlaps_before_sm_90() -> None:
    table = PlanTable(((1, GEMV), (16, SPLIT), (None, replace(POINTER, block_m=64))))
    mod = EmitTritonKernels(make_target("a100"))(module_of(WORK, table, outputs=1))
    found = overlapping(mod)
    assert set(found) == {"gemv", "row_norm", "matmul_pointer", "split_reduce"}
    assert set.union(*found.values()) == {False}


def early(mod: ir.IRModule, function: str) -> set[str]:
    """Return the values that a kernel's constant `early` has."""
    return {constant(k, "early") for k in kernels(mod)[function]}


def one_behind_another(chosen: TilePlan, computed: bool) -> ir.IRModule:
    """Return a module with a chain, and behind it a matmul of x by a parameter or a new tensor."""
    mod = module_of(replace(WORK, rows=8), PlanTable.single(POINTER), outputs=1)
    plain = replace(WORK, rows=8, norm=None, outputs=(Projection(384, "nk"),))
    (other,) = [
        f
        for _, f in module_of(plain, PlanTable.single(chosen), outputs=1).functions_items()
        if isinstance(f, tirx.PrimFunc)
    ]
    builder = relax.BlockBuilder(mod)
    gvar = builder.add_func(other, "behind")
    x, w = (relax.Var(n, relax.TensorType([s, 256], "float16")) for n, s in (("x", 8), ("w", 384)))
    first = [relax.Var(p.name, p.ty) for p in mod["main"].params]
    with builder.function("both", [*first, x, w]):
        with builder.dataflow():
            ty = relax.TensorType([8, 384], "float16")
            y = builder.emit(relax.call_tir(mod.get_global_var("fused"), first, ty))
            weight = builder.emit(relax.op.add(w, w)) if computed else w
            z = builder.emit(relax.call_tir(gvar, [x, weight], ty))
            out = builder.emit_output(relax.Tuple([y, z]))
        builder.emit_func_output(out)
    passes = MarkFixedArguments(H200), EmitTritonKernels(H200)
    return tvm.transform.Sequential(passes)(builder.get())


@pytest.mark.usefixtures("not_compiled")
def test_weights_are_read_early_where_no_kernel_writes_them() -> None:
    assert early(one_behind_another(GEMV, computed=False), "gemv") == {"True"}
    assert early(one_behind_another(GEMV, computed=True), "gemv") == {"False"}


@pytest.mark.usefixtures("not_compiled")
def test_behind_a_kernel_of_the_caller_weights_wait() -> None:
    plain = replace(WORK, rows=8, norm=None)
    assert early(emitted(plain, PlanTable.single(GEMV)), "gemv") == {"False"}


@pytest.mark.usefixtures("not_compiled")
def test_a_norm_in_front_reads_its_weights_early() -> None:
    work = replace(WORK, rows=8)
    assert early(emitted(work, PlanTable.single(TALL)), "row_norm") == {"True"}


@pytest.mark.usefixtures("not_compiled")
def test_several_projections_share_one_norm_and_one_launch() -> None:
    layer = Norm("layer", 1e-5, beta=True, residual=True, returns_sum=True, returns_norm=True)
    outputs = tuple(Projection(n, "nk") for n in (64, 32, 32))
    mod = emitted(replace(WORK, outputs=outputs, norm=layer), PlanTable.single(TALL), outputs=5)
    assert launched(mod) == ["row_norm", "matmul_pointer"]
    assert len(mod["main"].ret_ty.fields) == 5


def test_plans_for_tir_are_left_alone() -> None:
    tir = TilePlan(64, 64, 32, reg_m=4, reg_n=4, lanes=8, num_warps=8, family="fma_tiles")
    mod = module_of(WORK, PlanTable.single(tir), outputs=1)
    assert EmitTritonKernels(H200)(mod).same_as(mod)


class Block(nn.Module):
    """A norm, a gated FFN and its down projection, twice."""

    def __init__(self) -> None:
        self.norm = nn.RMSNorm(256, -1, 1e-5, bias=False)
        self.gate_up = nn.Linear(256, 1024, bias=False)
        self.down = nn.Linear(512, 256, bias=False)

    def main(self, x: nn.Tensor) -> nn.Tensor:
        for _ in range(2):
            gate, up = nn.op.split(self.gate_up(self.norm(x)), 2, axis=-1)
            x = x + self.down(nn.op.silu(gate) * up)
        return x


def launchers(built: tvm.runtime.Executable) -> list[str]:
    """Return the C sources in a compiled module."""
    return [
        m.inspect_source() for m in built.mod._collect_from_import_tree(lambda m: m.kind == "c")
    ]


@pytest.fixture
def block() -> Callable[[], ir.IRModule]:
    def make() -> ir.IRModule:
        module = Block()
        module.to("float16")
        spec = {"main": {"x": nn.spec.Tensor([1, "n", 256], "float16")}}
        return module.export_tvm(spec=spec)[0]

    return make


def test_the_pipeline_uses_triton_on_nvidia_gpus(block) -> None:
    report = Report()
    options = {"target": H200, "report": report, "variable_bounds": {"n": 64}}
    pipeline = relax.get_pipeline("relax_fusion", **options)
    built = tvm.compile(block(), H200, relax_pipeline=pipeline)
    plans = {p for d in report.fused for _, p in d.plans.entries}
    assert {p.family for p in plans if not is_launched(p)} <= {"few_rows"}
    assert len(report.fused) == 4  # two layers; each kernel is made once and called twice
    (source,) = launchers(built)
    assert "launch_gemv_" in source and "launch_matmul_" in source


def test_tir_on_request(block) -> None:
    report = Report()
    options = {"backend": "tir", "always_fuse": True, "variable_bounds": {"n": 16}}
    pipeline = relax.get_pipeline("relax_fusion", target=H200, report=report, **options)
    built = tvm.compile(block(), H200, relax_pipeline=pipeline)
    assert not any(is_launched(p) for d in report.fused for _, p in d.plans.entries)
    assert launchers(built) == []


def test_triton_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(PipelineError, match="backend 'triton' needs a CUDA target, sm_80 or newer"):
        relax.get_pipeline("relax_fusion", target="llvm", backend="triton")


@pytest.mark.usefixtures("not_compiled")
def test_a_users_own_plan(block) -> None:
    report = Report()
    own = PlanTable.single(MANY)
    pipeline = relax.get_pipeline(
        "relax_fusion", target=H200, report=report, plans={"FuseMatmulEpilogue": own}
    )
    with H200:
        pipeline(block())
    assert [d.plans for d in report.fused if d.pattern == "FuseMatmulEpilogue"] == [own, own]
