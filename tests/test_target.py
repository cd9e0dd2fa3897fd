"""From names and TVM targets to devices."""

from __future__ import annotations

import pytest
from tvm.target import Target

from relax_fusion import DEVICES, TargetError, host_target, make_target
from relax_fusion.target import device_of, is_cpu, is_cuda, is_gpu, without_tensor_cores


@pytest.mark.parametrize("name", [n for n, d in DEVICES.items() if d.kind == "gpu"])
def test_every_gpu_of_the_table_goes_there_and_back(name: str) -> None:
    target = make_target(name.upper())
    assert is_gpu(target) and is_cuda(target) and not is_cpu(target)
    assert device_of(target) == DEVICES[name]
    assert str(target.attrs["arch"]) == DEVICES[name].arch


def test_host() -> None:
    for name in ("llvm", "cpu"):
        dev = device_of(make_target(name))
        assert dev.kind == "cpu" and dev.sm_count == int(host_target().attrs["num-cores"])
    assert device_of(Target({"kind": "llvm", "num-cores": 3})).sm_count == 3


def test_targets_that_tvm_reads() -> None:
    target = make_target('{"kind": "cuda", "arch": "sm_90a"}')
    assert device_of(target) == DEVICES["h100"]
    assert make_target(target) is target
    assert device_of(Target({"kind": "cuda", "arch": "sm_86"})) == DEVICES["rtx3080"]


def test_another_gpu_gets_the_smallest_one_within_its_own_limits() -> None:
    dev = device_of(Target({"kind": "vulkan", "max_threads_per_block": 128}))
    assert dev.max_threads_per_block == 128
    assert dev.smem_per_block_bytes <= DEVICES["rtx3080"].smem_per_block_bytes


def test_unknown() -> None:
    with pytest.raises(TargetError, match="a100"):
        make_target("gpu-of-my-dreams")
    with pytest.raises(TargetError, match="'c'"):
        device_of(Target("c"))


def test_without_tensor_cores() -> None:
    assert str(without_tensor_cores(make_target("h200")).attrs["arch"]) == "sm_60"
    assert without_tensor_cores(host_target()).kind.name == "llvm"
