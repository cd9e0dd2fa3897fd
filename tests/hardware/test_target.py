"""From names and TVM targets to devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm.target import Target

from relax_fusion import DEVICES, TargetError, host_target, make_target
from relax_fusion.hardware.target import device_of, is_cpu, is_cuda, is_gpu, without_tensor_cores


@pytest.mark.parametrize("name", [n for n, d in DEVICES.items() if d.kind == "gpu"])
def test_every_gpu_of_the_table_goes_there_and_back(name: str) -> None:
    target, spec = make_target(name.upper()), DEVICES[name]
    assert is_gpu(target) and not is_cpu(target)
    assert is_cuda(target) == bool(spec.arch) and target.kind.name == spec.target_kind
    assert device_of(target) == spec
    assert str(target.attrs.get("arch", "")) == spec.arch


def test_host() -> None:
    for name in ("llvm", "cpu"):
        dev = device_of(make_target(name))
        assert dev.kind == "cpu" and dev.sm_count == int(host_target().attrs["num-cores"])
    assert device_of(Target({"kind": "llvm", "num-cores": 3})).sm_count == 3


def test_targets_that_tvm_reads() -> None:
    target = make_target('{"kind": "cuda", "arch": "sm_90a"}')
    assert is_cuda(target)
    assert make_target(target) is target
    for arch, name in (("sm_90a", "h100"), ("sm_80", "a100"), ("sm_86", "rtx3080")):
        found, spec = device_of(Target({"kind": "cuda", "arch": arch})), DEVICES[name]
        assert (found.label, found.modelled_on) == (f"{arch} GPU", spec.label)
        assert replace(found, label=spec.label, modelled_on="") == spec


STANDS_IN = [
    # target, device, threads, shared memory, threads in step, element types that it lacks
    ("metal", "m1", 256, 32768, 32, ()),
    ("apple/m1-gpu", "m1", 1024, 32768, 32, ()),
    ("opencl", "iris_xe", 256, 16384, 16, ()),
    ("qcom/adreno-opencl", "adreno730", 256, 0, 64, ()),
    ("qcom/adreno-vulkan", "adreno730", 256, 0, 64, ("float16", "bfloat16", "bool")),
    ({"kind": "opencl", "device": "mali"}, "mali_g710", 256, 16384, 16, ()),
    ("vulkan", "iris_xe", 256, 16384, 16, ("float16", "bfloat16", "bool")),
    (
        {"kind": "vulkan", "supports_float16": True, "supports_16bit_buffer": True},
        *("iris_xe", 256, 16384, 16, ("bfloat16", "bool")),
    ),
    ("webgpu", "iris_xe", 256, 32768, 16, ("bfloat16", "bool")),
    ({"kind": "rocm", "mcpu": "gfx90a"}, "mi300x", 256, 65536, 64, ()),
    ({"kind": "vulkan", "max_threads_per_block": 128}, "iris_xe", 128, 16384, 16, ...),
    ({"kind": "metal", "max_shared_memory_per_block": 0}, "m1", 256, 0, 32, ()),
]


@pytest.mark.parametrize("case", STANDS_IN, ids=lambda case: str(case[0])[:40])
def test_a_device_stands_in_within_the_limits_of_the_target(case: tuple) -> None:
    config, name, threads, smem, wave, missing = case
    target = Target(config)
    dev = device_of(target)
    assert (dev.name, dev.label) == (name, f"{target.kind.name} GPU")
    assert (dev.max_threads_per_block, dev.smem_per_block_bytes) == (threads, smem)
    assert (dev.wave_size, dev.warp_size) == (wave, 32)
    assert missing is ... or dev.missing_dtypes == missing


def test_a_model_of_another_kind_of_target_is_not_believed() -> None:
    assert device_of(Target({"kind": "metal", "model": "h200"})).name == "m1"
    assert device_of(Target({"kind": "cuda", "arch": "sm_80", "model": "cpu"})).name == "a100"


NONSENSE = [
    ({"max_threads_per_block": -3}, "max_threads_per_block is -3, must be at least 1"),
    ({"max_num_threads": 0}, "max_num_threads is 0, must be at least 1"),
    ({"max_shared_memory_per_block": -1}, "max_shared_memory_per_block is -1, must be at least 0"),
    ({"thread_warp_size": 0}, "thread_warp_size is 0, must be at least 1"),
    ({"thread_warp_size": 24}, "thread_warp_size is 24, must be a power of two up to 128"),
    ({"thread_warp_size": 256}, "thread_warp_size is 256, must be a power of two up to 128"),
]


@pytest.mark.parametrize("kind", ["metal", "cuda"])
@pytest.mark.parametrize(("attrs", "message"), NONSENSE, ids=lambda v: str(v)[:40])
def test_limits_that_no_gpu_could_have_are_refused(kind: str, attrs: dict, message: str) -> None:
    with pytest.raises(TargetError, match=f"target '{kind}': {message}"):
        device_of(Target({"kind": kind, **attrs}))


def test_unknown() -> None:
    with pytest.raises(TargetError, match="a100"):
        make_target("gpu-of-my-dreams")
    with pytest.raises(TargetError, match="'c'"):
        device_of(Target("c"))


def test_without_tensor_cores() -> None:
    assert str(without_tensor_cores(make_target("h200")).attrs["arch"]) == "sm_60"
    assert without_tensor_cores(host_target()).kind.name == "llvm"
    other = without_tensor_cores(Target({"kind": "metal", "max_threads_per_block": 512}))
    assert other.kind.name == "opencl" and int(other.attrs["max_threads_per_block"]) == 512
