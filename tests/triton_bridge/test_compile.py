"""Ahead-of-time compilation, and what the machine code then is."""

from __future__ import annotations

import multiprocessing
import os
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton import knobs

from relax_fusion.errors import KernelError
from relax_fusion.launch.kernel import CompiledKernel, check_entry
from relax_fusion.triton_bridge import KernelCache, check_triton
from relax_fusion.triton_bridge.compile import check_resources, compile_kernels, try_kernels
from relax_fusion.triton_bridge.kernel import KernelSource

from .common import (
    add_source,
    compiled,
    copy_by_descriptor,
    copy_tile,
    copy_tile_source,
    double_first,
    matmul,
    numbers,
    source,
)


@triton.jit
def constant(out, VALUE: tl.constexpr):
    if VALUE is None:
        tl.store(out, 10)
    elif isinstance(VALUE, tl.dtype):
        tl.store(out, tl.load(out).to(VALUE))
    elif VALUE == "double":
        tl.store(out, tl.load(out) * 2)
    else:
        tl.store(out, VALUE)


@triton.jit
def pair(out, VALUE: tl.constexpr):
    tl.store(out, VALUE[0] + VALUE[1])


@triton.jit
def five(
    out, A: tl.constexpr, B: tl.constexpr, n, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr
):
    tl.store(out, n + A + B * C - D * E)


@triton.jit
def wrong_name(x):
    tl.store(x, nowhere)  # noqa: F821


@triton.jit
def wrong_shape(x):
    tl.store(x + tl.arange(0, 8), tl.zeros((16,), tl.float32) + tl.zeros((8,), tl.float32))


@triton.jit
def wrong_assert(x):
    tl.static_assert(False, "words of the author")


@triton.jit
def wrong_range(x):
    tl.store(x + tl.arange(0, 7), 1)


def ptx(kernel: CompiledKernel) -> str:
    return kernel.ptx.decode()


def entry_params(kernel: CompiledKernel) -> list[str]:
    entry = re.search(r"\.entry \w+\((.*?)\)", ptx(kernel), re.DOTALL)
    return re.findall(r"\.param [^,\n]+", entry[1])


def one(kernel_source: KernelSource, **kwargs: Any) -> CompiledKernel:
    return compile_kernels([kernel_source], **kwargs)[0]


@pytest.mark.parametrize(("dtype", "block"), [("fp32", 512), ("fp16", 1024)])
def test_aligned_arguments_are_loaded_16_bytes_at_a_time(dtype: str, block: int) -> None:
    every = ("x", "y", "out", "n")
    wide = ptx(one(add_source(dtype, block, aligned=every)))
    narrow = ptx(one(add_source(dtype, block, aligned=())))
    assert re.search(r"ld\.global\.v4\.b32", wide) and re.search(r"st\.global\.v4\.b32", wide)
    assert not re.search(r"(ld|st)\.global\.v\d", narrow)


def test_the_machine_code_takes_what_a_launch_passes() -> None:
    types = {"out": "*fp32", "bit": "i1", "small": "i8", "middle": "i32"}
    types |= {"wide": "i64", "unsigned": "u32", "real": "fp32"}
    constants = {"ROWS": 32, "COLUMNS": 64}
    pointers = {"x": "*fp16", "out": "*fp16"}
    for kernel in [
        one(add_source()),
        one(copy_tile_source()),
        compiled(numbers, types),
        compiled(numbers, {**types, "real": "fp64"}),
        compiled(copy_by_descriptor, pointers, constants),
        compiled(double_first, {"x": "*fp32"}),
    ]:
        assert len(entry_params(kernel)) == len(kernel.machine_params())
        assert kernel.image[:4] == b"\x7fELF" and f".entry {kernel.entry}(" in ptx(kernel)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        *((1, 1), (2, 2), (-3, -3), (2.5, 2.5), (True, 1), (None, 10), ("double", None)),
        (tl.float16, None),
    ],
)
def test_constants_of_every_type(value: Any, stored: float | None) -> None:
    kernel = compiled(constant, {"out": "*fp32"}, {"VALUE": value})
    assert kernel.params == ("*fp32",) and dict(kernel.constants) == {"VALUE": str(value)}
    if stored is None:
        assert bool(re.search(r"cvt\.rn\.f16\.f32", ptx(kernel))) == (value is tl.float16)
        assert ("add.f32" in ptx(kernel) or "mul.f32" in ptx(kernel)) == (value == "double")
    else:
        assert has_number(kernel, stored)


def test_a_constant_that_is_a_tuple() -> None:
    kernel = compiled(pair, {"out": "*fp32"}, {"VALUE": (5, 2)})
    assert dict(kernel.constants) == {"VALUE": "(5, 2)"} and has_number(kernel, 7)


def has_number(kernel: CompiledKernel, value: float) -> bool:
    """Tell whether the code of a kernel has a float32 in it."""
    bits = struct.pack(">f", value)
    spellings = f"{struct.unpack('>i', bits)[0]}|0f{bits.hex()}"
    return re.search(rf"[ {{]({spellings})\b", ptx(kernel), re.IGNORECASE) is not None


def test_any_number_of_constants() -> None:
    assert compiled(double_first, {"x": "*fp32"}).constants == ()
    values = dict(zip("ABCDE", range(2, 7), strict=True))
    kernel = compiled(five, {"out": "*i32", "n": "i32"}, values)
    assert kernel.constants == tuple((name, str(v)) for name, v in values.items())
    assert kernel.params == ("*i32", "i32") and kernel.aligned == (True, False)
    total = 2 + 3 * 4 - 5 * 6
    assert re.search(rf"add\.s32 .*, {total};", ptx(kernel))


def test_a_tensor_map_is_a_parameter_of_128_bytes() -> None:
    kernel = one(copy_tile_source())
    assert ".align 64 .b8" in entry_params(kernel)[0] and "[128]" in entry_params(kernel)[0]
    assert "cp.async.bulk.tensor.2d" in ptx(kernel)
    (layout,) = kernel.tensor_maps
    assert (layout.block, layout.element_bytes) == ((32, 64), 2)
    assert layout.element_type == 6 and layout.swizzle == 3
    assert kernel.scratch_bytes == 0


DRIVER_TYPES = {"i8": 0, "u8": 0, "u16": 1, "u32": 2, "i32": 3, "fp16": 6, "fp32": 7, "bf16": 9}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8e5", "i8", "i32", "fp16"])
def test_the_driver_s_number_of_an_element_type(dtype: str) -> None:
    types = {"tile": f"tensordesc<{dtype}[32, 64]>", "out": f"*{dtype}"}
    kernel = compiled(copy_tile, types, {"ROWS": 32, "COLUMNS": 64})
    assert kernel.tensor_maps[0].element_type == DRIVER_TYPES.get(dtype, 0)
    size = {"fp32": 4, "i32": 4, "bf16": 2, "fp16": 2}.get(dtype, 1)
    assert kernel.tensor_maps[0].element_bytes == size


def test_a_descriptor_made_on_the_device_needs_scratch_memory() -> None:
    types = {"x": "*fp16", "out": "*fp16"}
    kernel = compiled(copy_by_descriptor, types, {"ROWS": 32, "COLUMNS": 64})
    assert kernel.scratch_bytes >= 128 and kernel.scratch_align >= 64
    assert kernel.tensor_maps == ()


def test_options_reach_the_machine_code() -> None:
    text = ptx(one(add_source(num_warps=8, maxnreg=40)))
    assert re.search(r"\.reqntid 256", text) and re.search(r"\.maxnreg 40", text)
    assert one(add_source(num_warps=8, maxnreg=40)).threads == 256


def test_targets() -> None:
    for capability in (80, 86, 89, 90, 100, 120):
        kernel = one(add_source(capability=capability))
        assert f".target {kernel.arch}\n" in ptx(kernel) and kernel.capability == capability


def matmul_source(n: int, block: int, **kwargs: Any) -> KernelSource:
    types = {"a": "*fp16", "b": "*fp16", "out": "*fp32", "K": "i32"}
    every = ("a", "b", "out", "K")
    return source(matmul, types, {"N": n, "BLOCK": block}, every, num_warps=8, **kwargs)


def test_much_shared_memory() -> None:
    kernel = one(matmul_source(128, 64, num_stages=4))
    assert 48 << 10 < kernel.shared_bytes <= 227 << 10


def test_too_much_shared_memory() -> None:
    with pytest.raises(KernelError, match=r"matmul needs \d+ bytes of shared mem.*sm_90a has") as e:
        one(matmul_source(128, 64, num_stages=9))
    needed, limit = map(int, re.findall(r"\b\d{5,}\b", str(e.value)))
    assert needed > limit == 232448
    assert "use smaller tiles or fewer stages" in str(e.value)
    with pytest.raises(KernelError, match=r"sm_86 has 101376 per thread block"):
        one(matmul_source(128, 64, num_stages=5, capability=86))


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (add_source(capability=80, num_ctas=2), r"num_ctas > 1 \(clusters\)"),
        (add_source(capability=89, dependent_launch=True), "dependent_launch"),
        (copy_tile_source(capability=86), "a tensor map"),
    ],
)
def test_what_older_devices_lack(made: KernelSource, what: str) -> None:
    expected = f"{made.name}: {what} needs sm_90 or newer; the target is sm_{made.capability}"
    with pytest.raises(KernelError, match=expected):
        compile_kernels([made])


def test_devices_that_are_too_old() -> None:
    with pytest.raises(KernelError, match="add: sm_75 is older than sm_80"):
        compile_kernels([add_source(capability=75)])


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (wrong_name, "nowhere is not defined"),
        (wrong_shape, "16.*8|8.*16"),
        (wrong_assert, "words of the author"),
        (wrong_range, "power of 2"),
    ],
)
def test_a_kernel_that_does_not_compile(kernel: Any, words: str) -> None:
    begin = rf"^{kernel.__name__}\(x: \*fp32\) does not compile for sm_90: "
    with pytest.raises(KernelError, match=begin) as caught:
        compiled(kernel, {"x": "*fp32"})
    assert re.search(words, str(caught.value), re.DOTALL)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0+git1", "3.10.0", "3.6.0rc1"])
def test_versions_of_triton_that_are_known(version: str) -> None:
    check_triton(version)


@pytest.mark.parametrize("version", ["3.5.1", "4.0.0", "2.1.0", "3.5.9+git9", "", "unknown"])
def test_versions_of_triton_that_are_not(version: str) -> None:
    with pytest.raises(KernelError, match=f"Triton {re.escape(version)} is installed; 3.6 or"):
        check_triton(version)


# --- with the cache --------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "kernels")


def test_equal_sources_are_compiled_once(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = triton.compile
    monkeypatch.setattr(triton, "compile", lambda *a, **k: calls.append(a) or real(*a, **k))
    sources = [add_source(), add_source(block=64), add_source(), add_source(block=64)]
    made = compile_kernels(sources, cache=cache, jobs=1)
    assert [dict(k.constants)["BLOCK"] for k in made] == ["128", "64", "128", "64"]
    assert len(calls) == 2 and len(list(cache.directory.iterdir())) == 2
    assert made[0] is made[2] and made[0].symbol != made[1].symbol


def test_the_second_time_nothing_is_compiled(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = one(add_source(), cache=cache)
    monkeypatch.setattr(triton, "compile", lambda *_a, **_k: pytest.fail("compiled again"))
    assert one(add_source(), cache=cache) == first


def test_a_damaged_entry_is_compiled_again(
    cache: KernelCache, caplog: pytest.LogCaptureFixture
) -> None:
    first = one(add_source(), cache=cache)
    path = cache.path(add_source().key())
    path.write_bytes(path.read_bytes()[:-9])
    again = one(add_source(), cache=cache)
    assert again == first and "is damaged" in caplog.text
    assert cache.get(add_source().key()) == first


def test_triton_s_own_cache_stays_empty(
    cache: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    always = knobs.compilation.always_compile
    one(add_source(), cache=cache)
    assert [path.name for path in tmp_path.iterdir()] == ["kernels"]
    assert knobs.compilation.always_compile == always
    assert knobs.cache.dir == str(tmp_path / "triton")


def test_what_is_compiled_twice_is_the_same(tmp_path: Path) -> None:
    first, second = (one(copy_tile_source(), cache=KernelCache(tmp_path / n)) for n in "ab")
    assert first == second and first.ptx == second.ptx
    check_entry(replace(second, ptx=first.ptx))


def several() -> list[KernelSource]:
    return [add_source("fp32", block) for block in (32, 64, 128)]


def test_processes_compile_what_one_would(cache: KernelCache, tmp_path: Path) -> None:
    one_by_one = compile_kernels(several(), cache=cache, jobs=1)
    assert compile_kernels(several(), cache=KernelCache(tmp_path / "other"), jobs=2) == one_by_one


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_in_the_place_of_a_kernel(cache: KernelCache, jobs: int) -> None:
    wrong = source(wrong_name, {"x": "*fp32"})
    good, bad, again = try_kernels([add_source(), wrong, add_source()], cache=cache, jobs=jobs)
    assert isinstance(bad, KernelError) and "nowhere is not defined" in str(bad)
    assert isinstance(good, CompiledKernel) and again is good
    assert [path.name for path in cache.directory.iterdir()] == [
        cache.path(add_source().key()).name
    ]


def test_a_compiler_that_ends_is_named(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "compile", lambda *_a, **_k: os._exit(3))
    with pytest.raises(KernelError, match=r"a compiler of add ended; jobs=1"):
        compile_kernels(several(), cache=cache, jobs=2)


def test_scratch_memory_is_aligned_as_tvm_allocates_it() -> None:
    kernel = replace(one(add_source()), scratch_bytes=512, scratch_align=512)
    with pytest.raises(KernelError, match=r"aligned to 512 bytes; .* begins at a multiple of 256"):
        check_resources(kernel, profiler_bytes=0)
    with pytest.raises(KernelError, match="compiled with Triton's profiler"):
        check_resources(one(add_source()), profiler_bytes=8)


@pytest.mark.parametrize("jobs", [1, 2])
def test_other_work_begins_when_processes_are_forked(cache: KernelCache, jobs: int) -> None:
    found: list[int] = []
    others = {process.pid for process in multiprocessing.active_children()}  # of other tests

    def meanwhile() -> None:
        found.append(len({p.pid for p in multiprocessing.active_children()} - others))

    assert len(try_kernels(several(), cache=cache, jobs=jobs, meanwhile=meanwhile)) > 1
    assert found == [jobs if jobs > 1 else 0]
    try_kernels(several(), cache=cache, jobs=jobs, meanwhile=meanwhile)
    assert found[1:] == [0]  # all are in the cache: it begins all the same


def test_clusters() -> None:
    kernel = one(add_source(num_ctas=2))
    assert kernel.options.num_ctas == 2
    assert re.search(r"\.(reqnctapercluster|cluster_dim|explicitcluster)", ptx(kernel)) or (
        "cluster" in ptx(kernel)
    )


def test_only_what_is_aligned_is_loaded_wide() -> None:
    text = ptx(one(add_source("fp32", 512, aligned=("x", "n"))))
    assert len(re.findall(r"ld\.global\.v4\.b32", text)) == 1
    assert not re.search(r"st\.global\.v", text)


def test_what_a_process_refuses_is_refused(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("no such layout")

    monkeypatch.setattr(triton, "compile", refuse)
    with pytest.raises(KernelError, match=r"does not compile for sm_.*no such layout"):
        compile_kernels(several(), cache=cache, jobs=2)
