"""The launches of attention: what they are."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.relax.frontend import nn

from relax_fusion.estimator import AttentionSize, candidates
from relax_fusion.estimator.families.triton_attention.tiles import (
    AttentionPlan,
    key_parts,
    smem_bytes,
)
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware import device
from relax_fusion.hardware.target import compute_capability, device_of, make_target
from relax_fusion.options import make_options
from relax_fusion.pipeline import PHASES
from relax_fusion.triton_bridge import EmitTritonKernels
from relax_fusion.triton_bridge.attention import attention_cases, empty_cases
from relax_fusion.triton_bridge.compile import compile_kernels
from relax_fusion.triton_bridge.launches import Step
from relax_fusion.triton_bridge.specialize import specialize
from relax_fusion.workload import Attention, DynamicDim, Heads

from ..support.launches import H200, launch_cases, parameters, plan_of
from ..support.triton_modules import module_of
from .common import kernels, launched


def steps_of(work: Attention, plan: TilePlan, most_queries: int | None = None) -> list[Step]:
    """Return the launches of `work` on the last condition, of which nothing is compiled."""
    return launch_cases(work, plan, parameters(work), most_queries)[-1][1]


LLAMA = Attention(
    *(DynamicDim("batch"), DynamicDim("q_len"), DynamicDim("kv_len"), 32, 8, 128, 128, 128**-0.5),
    *("bottom_right", None, "float16", "float16"),
    kv_prefix=True,
)
DECODE = plan_of(LLAMA, 64, block_m=16, block_n=64)
FLASH = TilePlan(128, 128, 128, num_stages=2, num_warps=12, family="flash")
GROUPS = AttentionPlan(16, 64, 64, groups=8, num_warps=8, family="groups")
HALVES = AttentionPlan(*(64, 128, 64), groups=2, num_stages=2, num_warps=8, family="halves")
SHORT = replace(LLAMA, batch=1, q_len=512, kv_len=512, head_dim=64, v_dim=64, kv_prefix=False)


IN_TILES = {"bias_dims": (False, True, True, True), "bias_dtype": "float16"}


def sized(values: dict[str, int], *numbers: Any) -> tuple[Any, ...]:
    """Return expressions with the sizes of `LLAMA` put in."""

    def known(value: Any) -> Any:
        return tvm_ffi.structural_map(
            value, (ir.Var, lambda v: tirx.IntImm(str(v.ty.dtype), values[v.name]))
        )

    return tuple(
        int(tvm.sym.Analyzer().simplify(known(n)).value) if isinstance(n, ir.Expr) else n
        for n in numbers
    )


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("keys", [1, 100, 1024, 8192])
def test_keys_are_cut_into_as_many_parts_as_are_priced(batch: int, keys: int) -> None:
    first, second = steps_of(LLAMA, DECODE, 1)
    sizes = {"batch": batch, "q_len": 1, "kv_len": keys, "kv_capacity": 9000}
    pairs, tiles, parts = sized(sizes, *first.grid)
    assert (pairs, tiles) == (8 * batch, 1)
    assert parts == key_parts(DECODE, LLAMA, H200, AttentionSize(batch, 1, keys))
    assert sized(sizes, second.args["SPLITS"]) == (parts,)
    rows, width = sized(sizes, *first.args["parts_ptr"].shape)
    assert width == 128 and rows >= parts * batch * 32
    assert first.args["lse_ptr"] is second.args["lse_ptr"]


def test_keys_that_a_window_hides_are_no_parts() -> None:
    near = replace(LLAMA, window=256)
    sizes = {"batch": 1, "q_len": 1, "kv_len": 8192, "kv_capacity": 9000}
    *_, parts = sized(sizes, *steps_of(near, DECODE, 1)[0].grid)
    assert parts == key_parts(DECODE, near, H200, AttentionSize(1, 1, 8192)) == 256 // 64


def test_room_for_parts_does_not_grow_with_queries_beyond_the_range() -> None:
    room = steps_of(LLAMA, DECODE, 16)[0].args["parts_ptr"]
    sizes = {"batch": 1, "q_len": 4096, "kv_len": 4096, "kv_capacity": 4096}
    assert sized(sizes, room.shape[0]) == (2 * H200.sm_count * 16,)


def test_one_part_of_the_keys_needs_no_merging() -> None:
    (one, whole), (rest, several) = launch_cases(LLAMA, DECODE, parameters(LLAMA), 1)
    assert rest is True and [len(whole), len(several)] == [1, 2]
    for batch, keys, expected in ((1, 64, True), (1, 65, False), (16, 999, True), (8, 999, False)):
        sizes = {"batch": batch, "q_len": 1, "kv_len": keys, "kv_capacity": 1000}
        assert sized(sizes, one) == (expected,)
    few = replace(LLAMA, batch=4)
    for most, expected in ((1, 1), (4, 1), (16, 2), (None, 2)):
        found = launch_cases(few, DECODE, parameters(few), most)
        assert len(found) == expected
    static = replace(LLAMA, batch=64, q_len=1, kv_len=4096)
    ((_, steps),) = launch_cases(static, DECODE, parameters(static), 1)
    assert len(steps) == 1


def test_a_map_of_a_cache_shows_the_keys_in_use() -> None:
    for layout, strides in (("bsnh", [800, 128, 1024, 1]), ("bnsh", [800, 100, 128, 1])):
        (step,) = steps_of(replace(LLAMA, kv_layout=layout), FLASH)
        q, k = step.args["q"], step.args["k"]
        sizes = {"batch": 3, "q_len": 20, "kv_len": 70, "kv_capacity": 100}
        assert sized(sizes, *q.shape) == (3, 32, 20, 128) and q.block == (1, 1, 64, 128)
        assert sized(sizes, *k.shape) == (3, 8, 70, 128) and k.block == (1, 1, 128, 128)
        each = 128 * np.array(strides[:1]) if layout == "bsnh" else 128 * np.array(strides[:2])
        assert sized(sizes, *k.strides)[: len(each)] == tuple(each)
        assert sized(sizes, *k.strides)[-1] == 1


def test_a_plan_with_tensor_maps_has_a_case_without_keys() -> None:
    params = parameters(LLAMA)
    table = PlanTable(((16, DECODE), (None, FLASH)))
    ((condition, (step,)),) = empty_cases(LLAMA, table, params, H200)
    assert step.function.__name__ == "attention_combine" and step.args["SPLITS"] == 0
    assert str(condition) == "kv_len <= T.int64(0)"
    assert empty_cases(LLAMA, PlanTable.single(DECODE), params, H200) == []
    known = replace(LLAMA, kv_len=7)
    assert empty_cases(known, table, parameters(known), H200) == []


def test_flash_has_one_program_a_multiprocessor() -> None:
    for change in ({"causal": "none"}, {"window": 99}, {"kv_len": 1024}):
        work = replace(LLAMA, batch=1, q_len=1024, **change)
        (step,) = steps_of(work, FLASH)
        assert step.grid == (H200.sm_count,) and step.options.num_warps == 4
        (step,) = steps_of(replace(work, q_len=200), FLASH)
        assert step.grid == (64,)


def test_flash_programs_of_many_keys_and_a_causal_mask_are_given_out_by_the_device() -> None:
    for kv_len in (DynamicDim("kv_len"), DynamicDim("kv_len", 1 << 20), 32768):
        (step,) = steps_of(replace(LLAMA, batch=1, q_len=1024, kv_len=kv_len), FLASH)
        assert step.grid == (8 * 32,) and step.constexprs["C"].section < 32
    (step,) = steps_of(
        replace(LLAMA, batch=1, q_len=1024, kv_len=DynamicDim("kv_len", 8192)), FLASH
    )
    assert step.grid == (H200.sm_count,) and step.constexprs["C"].section > 32


def test_flash_copies_tiles_of_a_bias_whose_rows_have_whole_vectors() -> None:
    work = replace(SHORT, **IN_TILES, head_dim=128, v_dim=128)
    (step,) = steps_of(work, FLASH)
    bias = step.args["bias"].ptr
    assert step.constexprs["C"].bias_tiles and bias.block == (1, 1, 64, 128)
    dynamic = replace(work, kv_len=DynamicDim("kv_len"))
    params = parameters(dynamic)
    (even, (tiles,)), (_, (loads,)) = launch_cases(dynamic, FLASH, params)
    assert str(even) == "kv_len % T.int64(8) == T.int64(0)"
    assert [s.constexprs["C"].bias_tiles for s in (tiles, loads)] == [True, False]
    for change in (
        {"kv_len": 500},
        {"bias_dtype": "float32"},
        {"bias_dims": (True, True, False, True)},
        {"head_dim": 256, "v_dim": 256},
    ):
        (step,) = steps_of(replace(work, **change), FLASH)
        assert not step.constexprs["C"].bias_tiles


def test_more_keys_than_the_bound_are_taken_by_another_kernel() -> None:
    work = replace(SHORT, kv_len=DynamicDim("kv_len", 512))
    params = parameters(work)
    found = launch_cases(work, GROUPS, params)
    assert [steps[0].function.__name__ for _, steps in found] == [
        *("attention_groups", "attention_pointer")
    ]
    assert [str(when) for when, _ in found] == ["kv_len <= T.int64(512)", "True"]
    assert len(launch_cases(SHORT, GROUPS, parameters(SHORT))) == 1


def test_groups_know_whether_tiles_are_whole() -> None:
    (step,) = steps_of(SHORT, GROUPS)
    assert step.grid == (1, 8, 512 * 4 // 16)
    assert step.constexprs["C"].groups == 8
    assert step.constexprs["C"].even_rows and step.constexprs["C"].even_keys
    assert step.args["k"].s.value == 8 * 64
    (step,) = steps_of(replace(SHORT, q_len=509, kv_len=500), GROUPS)
    assert not step.constexprs["C"].even_rows and not step.constexprs["C"].even_keys


def test_halves_copy_for_both_warp_groups() -> None:
    (step,) = steps_of(SHORT, HALVES)
    assert step.grid == (1, 32, 8) and step.options.num_warps == 4
    assert step.args["q"].block == (1, 1, 64, 64) and step.args["k"].block == (1, 1, 256, 64)
    assert step.constexprs["C"].even_keys
    (step,) = steps_of(replace(SHORT, kv_len=500), HALVES)
    assert not step.constexprs["C"].even_keys


@pytest.mark.parametrize(
    ("arch", "most", "expected"),
    [("sm_90a", 16, True), ("sm_90a", 4096, False), ("sm_80", 16, False), ("sm_100a", 16, True)],
)
def test_launches_of_few_queries_overlap(arch: str, most: int, expected: bool) -> None:
    params = parameters(LLAMA)
    dev = device_of(make_target({"kind": "cuda", "arch": arch, "model": "h200"}))
    cases = attention_cases(LLAMA, DECODE, params, most, dev, {})
    found = [step for _, steps in cases for step in steps]
    assert found
    for step in found:
        assert step.options.dependent_launch == expected
        assert step.constexprs["C"].pdl == expected


@pytest.mark.usefixtures("not_compiled")
def test_pointers_and_strides_are_aligned() -> None:
    table = PlanTable(((16, DECODE), (None, FLASH)))
    mod = EmitTritonKernels(make_target("h200"))(module_of(LLAMA, table, outputs=1))
    *_, pointer = kernels(mod)["attention_pointer"]
    assert all(
        aligned
        for kind, aligned in zip(pointer.params, pointer.aligned, strict=True)
        if kind == "i64" or kind.startswith("*")
    )


MERGED = {f"{x}_in": Heads(48, first) for x, first in (("q", 0), ("k", 32), ("v", 40))}


@pytest.mark.usefixtures("not_compiled")
def test_heads_of_a_merged_tensor_are_read_from_the_first_of_them_on() -> None:
    work = replace(SHORT, **MERGED, kv_len=DynamicDim("kv_len"))
    (step,) = steps_of(work, FLASH)
    q, k, v = (step.args[x] for x in "qkv")
    assert [(m.of.of.name, m.of.start) for m in (k, v)] == [("k", 32 * 64), ("v", 40 * 64)]
    assert q.of.name == "q" and [q.shape[1], k.shape[1]] == [32, 8]
    assert q.strides[1:] == k.strides[1:] == [64, 48 * 64, 1]
    in_turns = replace(work, q_heads=8, **{f"{x}_in": Heads(24, i, 3) for i, x in enumerate("qkv")})
    (step,) = steps_of(in_turns, plan_of(in_turns))
    assert [step.args[x].n for x in "qkv"] == [3 * 64] * 3
    assert step.args["v"].ptr.start == 2 * 64


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize(("width", "expected"), [(64, [True] * 3), (20, [True, False, True])])
def test_pointers_into_a_merged_tensor_promise_what_they_can(
    width: int, expected: list[bool]
) -> None:
    part = {f"{x}_in": Heads(9, i, 3) for i, x in enumerate("qkv")}
    heads = {"q_heads": 3, "kv_heads": 3, "head_dim": width, "v_dim": width}
    work = replace(SHORT, kv_len=512, **heads, **part)
    table = PlanTable.single(plan_of(work))
    mod = EmitTritonKernels(make_target("h200"))(module_of(work, table, outputs=1))
    (kernel,) = (k for several in kernels(mod).values() for k in several)
    pointers = [a for p, a in zip(kernel.params, kernel.aligned, strict=True) if p[0] == "*"]
    assert pointers[:3] == expected and all(pointers[3:])


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pointers_into_a_tensor_are_bytes_from_its_begin_on(dtype: str) -> None:
    work = replace(SHORT, **MERGED, kv_len=512, dtype=dtype)
    mod = EmitTritonKernels(make_target("h200"))(
        module_of(work, PlanTable.single(DECODE), outputs=1)
    )
    text = mod.script()
    found = re.findall(r"T.handle_add_byte_offset\(\w+(?:\.data)?, (\d+)\)", text)
    assert {int(offset) for offset in found} == {32 * 64 * 2, 40 * 64 * 2}
    assert "tvm_access_ptr" not in text  # of the element type, which TVM replaces for bfloat16


@pytest.mark.usefixtures("not_compiled")
def test_before_sm_90_there_are_pointers() -> None:
    work = replace(LLAMA, batch=1, kv_len=100, kv_prefix=False, dtype="bfloat16")
    mod = EmitTritonKernels(make_target("a100"))(
        module_of(work, PlanTable.single(DECODE), outputs=1)
    )
    assert launched(mod) == ["attention_pointer", "attention_pointer", "attention_combine"]
    assert {k.capability for several in kernels(mod).values() for k in several} == {80}


LARGEST = [
    ("h200", {"head_dim": 256, "v_dim": 256}, "flash"),
    ("h200", {"head_dim": 256, "v_dim": 256, "mask_dims": (True, True, True, True)}, "attention"),
    ("h200", {**IN_TILES, "head_dim": 128, "v_dim": 128}, "flash"),
    ("h200", {"head_dim": 80, "v_dim": 80}, "groups"),
    ("h200", {"kv_heads": 32}, "halves"),
    ("a100", {"head_dim": 256, "v_dim": 256}, "attention"),
    ("rtx3080", {"bias_dims": (True, True, True, True)}, "attention"),
    ("rtx3080", {"bias_dims": (True, True, True, False), "kv_len": 500}, "attention"),
    ("rtx4090", {"mask_dims": (True, False, True, True), "kv_len": 500}, "attention"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("without_code")
def test_shared_memory_is_what_the_estimator_says() -> None:
    """Of the candidate that needs most, by device, workload and family."""
    sources, said = [], []
    for name, changes, family in LARGEST:
        dev, target = device(name), make_target(name)
        kv_len = 256 if "head_dim" in changes else 512
        work = replace(SHORT, **{"causal": "none", "kv_len": kv_len, **changes})
        plans = [p for p in candidates(work, dev, "triton") if p.family == family]
        largest = max(plans, key=lambda p: smem_bytes(p, work, dev))
        params = parameters(work)
        ((_, (step, *_)),) = attention_cases(work, largest, params, None, dev, {})
        out = relax.TensorType([1, 512, 32, work.v_dim], "float16")
        capability = compute_capability(target)
        sources.append(
            specialize(step.function, step.args, step.constexprs, step.options, [out], capability)
        )
        said.append(smem_bytes(largest, work, dev))
    found = [k.shared_bytes for k in compile_kernels([source for source, _ in sources])]
    both = list(zip(found, said, strict=True))
    assert len(both) == len(LARGEST)
    assert all(n <= most for n, most in both), both
    assert all(most <= 1.12 * n for n, most in both[:-2]), both  # odd keys, with luck, need less


class Chain(nn.Module):
    """Attention over attention; the first reads, and the last writes, what is not in a graph."""

    def main(self, x: nn.Tensor) -> nn.Tensor:
        for _ in range(4):
            x = nn.op.scaled_dot_product_attention(x, x, x, is_causal=True)
        return x


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize(("length", "graphs"), [(64, 1), ("n", 0)])
def test_attention_of_static_sizes_is_part_of_a_cuda_graph(length: int | str, graphs: int) -> None:
    spec = {"main": {"x": nn.spec.Tensor([1, length, 4, 64], "float16")}}
    mod, _ = Chain().export_tvm(spec=spec)
    own = plan_of(LLAMA, block_m=64, block_n=64)
    options = make_options(
        make_target("h200"), {"plans": {"FuseAttentionChain": replace(own, block_k=64)}}
    )
    with options.target:
        for _, phase, _ in PHASES:
            mod = tvm.transform.Sequential(phase(options))(mod)
    captured = [
        func.script()
        for gvar, func in mod.functions_items()
        if isinstance(func, relax.Function) and "capture" in gvar.name_hint
    ]
    assert len(captured) == graphs
    assert all("fuse_attention_chain" in text for text in captured)
