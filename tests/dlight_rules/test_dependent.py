"""Products that begin while a norm is computed: the order of their kernels, and their launches."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import tvm
from tvm import s_tir, te, tirx
from tvm.s_tir import dlight as dl
from tvm.script import tirx as T
from tvm.target import Target

from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules import FusedRule, ScheduleKernels
from relax_fusion.dlight_rules.tensor_cores.dependent import LAUNCH_PARAMS
from relax_fusion.estimator import candidates, footprint
from relax_fusion.estimator.families.few_rows import tiles as few_rows
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.transforms.fixed_arguments import FIXED_ATTR, Fixed
from relax_fusion.workload import GatedFFN, NormMatmul

from ..support.contraction_cases import HALF, HALF_GATED, RMS, ROWS, plain
from .compiled import compiled, cuda, kernels

Work = NormMatmul | GatedFFN
H200 = device_of(make_target("h200"))
NORMED = replace(HALF, rows=ROWS, k=4096, outputs=(plain(512), plain(64)), norm=RMS)
CALL = 'griddepcontrol("{}"'
WAIT, ANNOUNCE = "griddepcontrol_wait()", "griddepcontrol_launch_dependents()"


def plan_of(work: Work, family: str, inside: bool = False) -> TilePlan:
    """Return the smallest plan of a family with a kernel for the norm, or with it `inside`."""
    found = [p for p in candidates(work, H200, "tir") if p.family == family]
    fitting = [p for p in found if (family == few_rows.FAMILY and few_rows.normalises(p)) == inside]
    return min(fitting, key=lambda p: (p.block_m * p.block_n, p.num_stages))


def bodies(text: str) -> list[str]:
    """Return the statements of each kernel."""
    return [kernel[kernel.index("{") :] for kernel in kernels(text)]


def launches(host: str) -> list[str]:
    """Return the launch parameters of each kernel."""
    return re.findall(r"call_ffi_kernel\(.*launch_params=\[(.*?)\]", host)


def places(kernel: str) -> list[int]:
    """Return where a kernel reads the first weight, waits, lets the next one begin, and reads x."""
    x = min(kernel.index(name) for name in ("x_ptr", "x_norm_ptr") if name in kernel)
    return [kernel.index("w0_ptr"), kernel.index(WAIT), kernel.index(ANNOUNCE), x]


@pytest.mark.parametrize("family", [few_rows.FAMILY, "mma", "wgmma"])
def test_products_begin_while_a_norm_is_computed(family: str) -> None:
    plan = plan_of(NORMED, family)
    text, host = compiled(NORMED, plan)
    norm, *products = bodies(text)
    assert norm.index(WAIT) < norm.index(ANNOUNCE) < norm.index("x_ptr")
    assert len(products) == 2
    for index, product in enumerate(products):
        few = family == few_rows.FAMILY
        assert product.count(WAIT) == 1
        assert (ANNOUNCE in product) == few
        assert product.index(WAIT) < product.index("x_norm_ptr")
        assert (product.index(f"w{index}_ptr") < product.index(WAIT)) == few
    found = launches(host)
    assert len(found) == 3
    assert all("programtic_dependent_launch" in params for params in found)


ONE = replace(NORMED, outputs=(plain(512),), rows=1)


@pytest.mark.parametrize("has_norm", [True, False])
def test_weights_that_nobody_writes_are_asked_for_first(has_norm: bool) -> None:
    work = replace(ONE, norm=RMS if has_norm else None)
    plan = plan_of(work, few_rows.FAMILY, inside=has_norm)
    (early,), (late,) = (bodies(compiled(work, plan, fixed=fixed)[0]) for fixed in (True, False))
    assert early.count(WAIT) == 1
    assert places(early) == sorted(places(early))
    assert late.count(WAIT) == 2
    assert late.index(WAIT) < min(late.index("w0_ptr"), late.index("x_ptr"))


def test_of_several_weights_all_must_be_fixed() -> None:
    func = build_prim_func(GATED, PlanTable.single(FEW))
    names = [o.name for o in GATED.graph.inputs]
    assert names == ["x", "gamma", "w0"]
    for known, early in (("w0", True), ("x gamma", False), ("x gamma w0", True)):
        fixed = Fixed(tuple(name in known.split() for name in names), False, (False,) * 3)
        marked = func.with_attr(FIXED_ATTR, fixed.to_attr())
        made = FusedRule().apply(marked, cuda(), False).mod["main"].script()
        assert (made.count(CALL.format("wait")) == 1) == early
    leading = func.with_attr(FIXED_ATTR, Fixed((True,) * 3, True, (False,) * 3).to_attr())
    made = FusedRule().apply(leading, cuda(), False).mod["main"].script()
    assert made.count(CALL.format("wait")) == 2


def test_every_kernel_of_every_range_waits() -> None:
    few, one = plan_of(NORMED, few_rows.FAMILY), plan_of(ONE, few_rows.FAMILY, True)
    table = PlanTable(((1, one), (16, few), (None, plan_of(NORMED, "mma"))))
    for body in bodies(compiled(NORMED, table, fixed=True)[0]):
        assert body.count(WAIT) == 1


def test_launches_are_plain_on_older_devices() -> None:
    text, host = compiled(ONE, plan_of(ONE, few_rows.FAMILY), make_target("a100"))
    assert len(bodies(text)) == 2
    assert "griddepcontrol" not in text
    assert "programtic" not in host


@T.prim_func(private=True, s_tir=True)
def doubled(x: T.Buffer((T.int64(4096),), "float16"), y: T.Buffer((T.int64(4096),), "float16")):
    for i in range(T.int64(4096)):
        with T.sblock("y"):
            v = T.axis.remap("S", [i])
            y[v] = x[v] + x[v]


@T.prim_func(private=True, s_tir=True)
def copied(x: T.Buffer((T.int64(4096),), "float16"), y: T.Buffer((T.int64(4096),), "float16")):
    for i in range(T.int64(4096)):
        with T.sblock("y"):
            v = T.axis.remap("S", [i])
            y[v] = x[v]


def scheduled(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    with target:
        mod = ScheduleKernels(target, [dl.gpu.Fallback()])(tvm.IRModule({"main": func}))
    return mod["main"]


@T.prim_func(private=True)
def doubled_by_threads(
    x: T.Buffer((T.int64(4096),), "float16"), y: T.Buffer((T.int64(4096),), "float16")
):
    for block in T.thread_binding(T.int64(32), "blockIdx.x"):
        for thread in T.thread_binding(T.int64(128), "threadIdx.x"):
            y[block * 128 + thread] = x[block * 128 + thread] + x[block * 128 + thread]


def bound(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function that somebody else made a kernel."""
    sch = s_tir.Schedule(func)
    (loop,) = sch.get_loops(sch.get_sblock("y"))
    block, thread = sch.split(loop, [None, 128])
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    return sch.mod["main"]


@pytest.mark.parametrize(
    "func",
    [doubled, bound(doubled), doubled_by_threads],
    ids=["scheduled here", "a kernel", "a kernel without blocks"],
)
def test_small_kernels_of_others_wait_and_let_the_next_one_begin(func: tirx.PrimFunc) -> None:
    made = scheduled(func, cuda())
    text = made.script()
    assert text.index(CALL.format("wait")) < text.index(CALL.format("launch_dependents"))
    assert (
        list(made.attrs["tirx.kernel_launch_params"]) == LAUNCH_PARAMS["tirx.kernel_launch_params"]
    )


@pytest.mark.parametrize("left", ["a view", "large", "of any size", "older device"])
def test_other_kernels_are_left_alone(left: str) -> None:
    n = {"large": 1 << 30}.get(left, 4096)
    func = te_doubled(tirx.Var("n", "int64") if left == "of any size" else n)
    func = copied if left == "a view" else func
    made = scheduled(func, make_target("a100") if left == "older device" else cuda())
    assert "griddepcontrol" not in made.script()
    assert "tirx.kernel_launch_params" not in made.attrs


def te_doubled(n: tirx.Var | int) -> tirx.PrimFunc:
    x = te.placeholder((n,), "float16", "x")
    return te.create_prim_func([x, te.compute((n,), lambda i: x[i] + x[i], "y")])


def asked(host: str) -> set[int]:
    """Return the dynamic shared memory of the kernels that have some."""
    return {int(n) for n in re.findall(r"T\.int64\((\d+)\), launch_params=.*dyn_shared", host)}


A100 = make_target("a100")
GATED = replace(HALF_GATED, rows=1, k=4096, n=64, norm=RMS)
FEW = TilePlan(
    *(8, 16, 256), reg_m=1, reg_n=16, lanes=8, num_stages=2, num_warps=4, family=few_rows.FAMILY
)


@pytest.mark.parametrize(
    ("work", "plan"),
    [
        (GATED, FEW),
        (GATED, replace(FEW, num_warps=8, block_k=512)),
        (NORMED, plan_of(NORMED, "mma")),
        (NORMED, plan_of(NORMED, "wgmma")),
        (NORMED, plan_of(NORMED, few_rows.FAMILY)),
    ],
    ids=["a ring of less than 48 KB", "more", "mma", "wgmma", "norm in front"],
)
def test_shared_memory_is_all_dynamic(work: Work, plan: TilePlan) -> None:
    """TVM lets a kernel have more than 48 KB only if its dynamic shared memory alone is more."""
    target = None if plan.family == "wgmma" else A100
    text, host = compiled(work, plan, target)
    assert asked(host) == {footprint(work, plan, device_of(target or cuda())).smem_bytes}
    for product in bodies(text)[-len(work.outputs if work is NORMED else "w") :]:
        assert "__shared__" not in product.replace("extern __shared__", "")


def test_blocks_have_the_memory_of_their_share_of_a_multiprocessor() -> None:
    """Launched early, they come as others go, and would fill the first that are free."""
    work = replace(NORMED, outputs=(plain(6144),), rows=1)
    plan = plan_of(work, few_rows.FAMILY)
    assert (plan.block_n, H200.sm_count, H200.smem_per_sm_bytes) == (16, 132, 228 << 10)
    shares = {n: asked(compiled(replace(work, outputs=(plain(n),)), plan)[1]) for n in (6144, 2112)}
    assert shares == {6144: {(228 << 10) // 3 - 1024}, 2112: {227 << 10}}
    many = replace(work, outputs=(plain(1 << 17),))
    assert asked(compiled(many, plan)[1]) == {footprint(many, plan, H200).smem_bytes}
