"""Nothing that accesses memory of a GPU is left to the host: kernels of odd functions, refusals."""

from __future__ import annotations

import re

import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from relax_fusion import PipelineOptions, SchedulingError, host_target, make_target
from relax_fusion.dlight_rules import ScheduleKernels
from relax_fusion.dlight_rules.host_code import host_accesses
from relax_fusion.pipeline import schedule_kernels
from relax_fusion.report.decision import Scheduling

GPU = make_target("h200")
RULES = schedule_kernels(PipelineOptions(GPU)).rules


@T.prim_func(s_tir=True, check_well_formed=False)
def bare_loop(x: T.Buffer((16,), "float32")):
    for i in T.parallel(16):
        x[i] = x[i] * 2.0


@T.prim_func(s_tir=True, check_well_formed=False)
def unknown_length(handle: T.handle, n: T.int64):
    x = T.match_buffer(handle, (n,), "float32")
    for i in range(n):
        x[i] = T.exp(x[i])


@T.prim_func(s_tir=True, check_well_formed=False)
def scalars(x: T.Buffer((), "float32"), y: T.Buffer((), "float32")):
    with T.sblock("add"):
        y[()] = x[()] + 1.0


@T.prim_func(s_tir=True, check_well_formed=False)
def scan(x: T.Buffer((16,), "int32")):
    for i in range(15):
        with T.sblock("scan"):
            vi = T.axis.opaque(15, i)
            T.reads(x[vi])
            T.writes(x[vi + 1])
            x[vi + 1] = x[vi + 1] + x[vi]


@T.prim_func(s_tir=True, check_well_formed=False)
def bound_value(x: T.Buffer((16,), "int32"), y: T.Buffer((16,), "int32")):
    first: T.let[T.int32] = x[0]
    for i in range(16):
        y[i] = first


@T.prim_func(s_tir=True, check_well_formed=False)
def local_memory(x: T.Buffer((16,), "int32")):
    n = T.alloc_buffer((1,), "int32", scope="local")
    n[0] = 0
    while n[0] < 16:
        x[n[0]] = n[0]
        n[0] = n[0] + 1


@T.prim_func(s_tir=True, check_well_formed=False)
def loop_and_block(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
    reverse = T.sblock_alloc_buffer((64,), "float32")
    for i in range(64):
        reverse[i] = x[63 - i]
    for i in range(64):
        with T.sblock("copy"):
            vi = T.axis.spatial(64, i)
            y[vi] = reverse[vi]


@T.prim_func(s_tir=True, check_well_formed=False)
def around_a_call(x: T.Buffer((16,), "float32")):
    x[0] = 1.0
    T.evaluate(T.call_packed("f", x.data))
    x[1] = 1.0


@T.prim_func(s_tir=True, check_well_formed=False)
def own_threads(x: T.Buffer((16,), "int32")):
    for i in T.thread_binding(16, "threadIdx.x"):
        x[i] = 1


@T.prim_func(s_tir=True, check_well_formed=False)
def own_launch(x: T.Buffer((16,), "int32")):
    with T.sblock("opaque"):
        b = T.launch_thread("blockIdx.x", 16)
        x[b] = 1


@T.prim_func(s_tir=True, check_well_formed=False)
def library_call(x: T.Buffer((16,), "int32")):
    T.evaluate(T.call_packed("f", T.address_of(x[3]), x.data))


@T.prim_func(s_tir=True, check_well_formed=False)
def call_in_a_loop(x: T.Buffer((16,), "float32")):
    for i in range(4):
        x[i] = 1.0
        T.evaluate(T.call_packed("f", x.data))


@T.prim_func(s_tir=True, check_well_formed=False)
def launch_in_a_loop(x: T.Buffer((16,), "float32")):
    for i in range(4):
        x[i] = 1.0
        for t in T.thread_binding(16, "threadIdx.x"):
            x[t] = 2.0


@T.prim_func(s_tir=True, check_well_formed=False)
def block_and_call(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
    for i in range(64):
        with T.sblock("copy"):
            vi = T.axis.spatial(64, i)
            y[vi] = x[vi]
    for i in range(64):
        x[i] = 1.0
        T.evaluate(T.call_packed("f", x.data))


NEED_A_KERNEL = [
    *(bare_loop, unknown_length, scalars, scan, bound_value, local_memory),
    *(loop_and_block, around_a_call),
]
LEFT = [own_threads, own_launch, library_call]
REFUSED = [
    (call_in_a_loop, 'accesses tensors and calls "f"'),
    (launch_in_a_loop, "accesses tensors and launches threads"),
]


def name_of(func: tirx.PrimFunc) -> str:
    return str(func.attrs["global_symbol"])


def scheduled(*funcs: tirx.PrimFunc, target: tvm.target.Target = GPU) -> tvm.IRModule:
    return ScheduleKernels(target, RULES)(tvm.IRModule({name_of(f): f for f in funcs}))


def test_odd_functions_become_kernels() -> None:
    mod = scheduled(*NEED_A_KERNEL)
    for func in NEED_A_KERNEL:
        assert host_accesses(func.body), name_of(func)
        assert not host_accesses(mod[name_of(func)].body), name_of(func)
    (library,) = tvm.compile(mod, GPU).mod.imports
    source = library.inspect_source()
    heads = re.findall(r"__global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\(([^)]*)\) {", source)
    kernels = {re.sub(r"_kernel(_\d+)?$", "", name) for name, _ in heads}
    assert kernels == {name_of(f) for f in NEED_A_KERNEL}
    arguments = {name: re.findall(r"(\w+?)_ptr", given) for name, given in heads}
    assert sorted(arguments["bound_value_kernel"]) == ["x", "y"], "no memory of the host"
    assert arguments["local_memory_kernel"] == ["x"], "no memory of the host"


def test_what_needs_no_schedule_is_left() -> None:
    record: list[Scheduling] = []
    before = tvm.IRModule({name_of(f): f for f in LEFT})
    after = ScheduleKernels(GPU, RULES, record)(before)
    tvm.ir.assert_structural_equal(before, after)
    assert [(s.rule, s.refusals) for s in record] == [("", ())] * len(LEFT)


@pytest.mark.parametrize(("func", "why"), REFUSED, ids=lambda v: getattr(v, "__name__", None))
def test_a_function_without_a_schedule_is_an_error(func: tirx.PrimFunc, why: str) -> None:
    name = name_of(func)
    with pytest.raises(SchedulingError, match=f"{name} for cuda.* x on the host .*{why}") as raised:
        scheduled(func)
    assert "\n" not in str(raised.value).strip()
    for done in ("tirx.is_scheduled", "tirx.is_host_func"):
        scheduled(func.with_attr(done, 1))
    scheduled(func, target=host_target())
    scheduled(func.with_attr("target", host_target()))


def test_every_rule_says_why() -> None:
    with pytest.raises(
        SchedulingError, match=r"\(CopyRule: .*; dlight.Fallback: it leaves x .*; SingleThread"
    ):
        scheduled(block_and_call)


def test_a_function_of_a_kernel_stays_a_part_of_it() -> None:
    source = """
@I.ir_module(check_well_formed=False)
class Module:
    @T.prim_func(private=True, s_tir=True)
    def part(x: T.Buffer((16,), "float32"), i: T.int32):
        x[i] = 1.0

    @T.prim_func(s_tir=True)
    def kernel(x: T.Buffer((16,), "float32")):
        for t in T.thread_binding(16, "threadIdx.x"):
            Module.part(x, t)

    @T.prim_func(s_tir=True)
    def loop(x: T.Buffer((16,), "float32")):
        for i in range(16):
            Module.part(x, i)
"""
    mod = tvm.script.from_source(source)
    after = ScheduleKernels(GPU, RULES)(mod)
    assert after["part"].same_as(mod["part"]) and after["kernel"].same_as(mod["kernel"])
    assert host_accesses(mod["loop"].body, mod.functions.get) == ["x", "part"]
    assert not host_accesses(after["loop"].body, mod.functions.get)
