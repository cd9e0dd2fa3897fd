"""Embedded Triton kernels on a GPU: in the VM, in CUDA graphs, from libraries made elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.target import Target

from relax_fusion.hardware.target import make_target

from ..support.chains import Chain, module
from ..support.gpu import gpu_target, needs_gpu
from .triton_cases import CASES, DOUBLE_WIDE, Case, build

pytestmark = [pytest.mark.gpu, needs_gpu]

HERE = Path(__file__).parent


def _on(dev: tvm.runtime.Device, arrays: list[np.ndarray]) -> list[tvm.runtime.Tensor]:
    return [tvm.runtime.tensor(a, dev) for a in arrays]


def _bare(name: str, target: Target) -> tvm.runtime.Executable:
    """Return a kernel and nothing else, whose main returns a tuple."""
    case = next(c for c in CASES if c.name == name)
    return build(case.bare_module(target), target)


def _check_sums(vm: relax.VirtualMachine, dev: tvm.runtime.Device, n: int, seed: int) -> None:
    """Check ``x + y`` of n elements."""
    x, y = np.random.default_rng(seed).normal(size=(2, n)).astype("float32")
    (found,) = vm["main"](*_on(dev, [x, y]))
    np.testing.assert_array_equal(found.numpy(), x + y)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_in_the_vm(case: Case) -> None:
    dev, target = tvm.cuda(0), gpu_target()
    vm = relax.VirtualMachine(build(case.module(target, static=False), target), dev)
    for seed in range(2):
        inputs = case.inputs(seed)
        case.check(inputs, vm["main"](*_on(dev, inputs)), 2)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_in_a_cuda_graph(case: Case) -> None:
    dev, target = tvm.cuda(0), gpu_target()
    executable = build(case.module(target, static=True), target, graph=True)
    assert case.in_place or "cuda_graph" in executable.as_text()
    vm = relax.VirtualMachine(executable, dev)
    for seed in range(3):  # the first call captures, the others replay
        inputs = case.inputs(seed)
        case.check(inputs, vm["main"](*_on(dev, inputs)), 2)


def test_lengths_and_nothing_at_all() -> None:
    dev = tvm.cuda(0)
    vm = relax.VirtualMachine(_bare("vector_add", gpu_target()), dev)
    for n in (1, 255, 256, 257, 100_003, 0):
        _check_sums(vm, dev, n, n)


def test_more_than_two_to_the_31_elements() -> None:
    import torch

    wide = Case("wide", (("n",),), DOUBLE_WIDE, lambda x: [2 * x], dtype="int8")
    target = gpu_target()
    vm = relax.VirtualMachine(build(wide.bare_module(target), target), tvm.cuda(0))
    data = torch.randint(-60, 60, (2**31 + 1000,), dtype=torch.int8, device="cuda")
    out = torch.from_dlpack(vm["main"](tvm.runtime.from_dlpack(data))[0])
    assert bool((out[-2000:] == 2 * data[-2000:]).all())
    assert bool((out[:2000] == 2 * data[:2000]).all())


def test_from_several_threads() -> None:
    dev = tvm.cuda(0)
    library = _bare("vector_add", gpu_target()).jit()

    def run(seed: int) -> None:
        vm = relax.VirtualMachine(library, dev)
        for n in range(1, 400, 37):
            _check_sums(vm, dev, n, seed)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(16)))


def test_on_the_current_stream() -> None:
    """Kernels follow TVM's stream: a long queue there is waited for by that stream alone."""
    import torch
    import tvm_ffi

    vm = relax.VirtualMachine(_bare("vector_add", gpu_target()), tvm.cuda(0))
    side = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    ones = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s in front of the fill
        x.fill_(5)
        with tvm_ffi.use_torch_stream():
            (out,) = vm["main"](tvm.runtime.from_dlpack(x), tvm.runtime.from_dlpack(ones))
    side.synchronize()
    assert float(torch.from_dlpack(out)[7]) == 6


def test_on_the_second_device() -> None:
    if not tvm.cuda(1).exist:
        pytest.skip("needs a second GPU")
    library = _bare("vector_add", gpu_target()).jit()
    for index in (1, 0, 1):
        dev = tvm.cuda(index)
        vm = relax.VirtualMachine(library, dev)
        _check_sums(vm, dev, 1000, index)


def test_misaligned_tensor_is_an_error() -> None:
    import torch

    vm = relax.VirtualMachine(_bare("vector_add", gpu_target()), tvm.cuda(0))
    x = torch.ones(1001, device="cuda")
    good = tvm.runtime.from_dlpack(x[:1000].clone())
    with pytest.raises(Exception, match=r"begins at 0x.*multiples of 16"):
        vm["main"](x[1:], x[:1000].clone())
    np.testing.assert_array_equal(vm["main"](good, good)[0].numpy(), np.full(1000, 2, "float32"))


@pytest.mark.parametrize("backend", ["tir", "triton"])
def test_misaligned_operands_of_a_matmul(backend: str) -> None:
    """Each is an error, after which the device goes on."""
    import torch

    norm = "h = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5); y = R.matmul(h, w)"
    chain = Chain("main", "x[64,1024] w[1024,1024] g[1024]", norm, "y", {}, "float16")
    target = gpu_target()
    pipeline = relax.get_pipeline("relax_fusion", target=target, backend=backend)
    built = tvm.compile(module([chain]), target, relax_pipeline=pipeline)
    main = relax.VirtualMachine(built, tvm.cuda(0))["main"]
    sizes = (64, 1024), (1024, 1024), (1024,)
    good = [torch.ones(size, dtype=torch.float16, device="cuda") for size in sizes]
    for number, operand in enumerate(good[:2]):
        room = torch.ones(operand.numel() + 1, dtype=torch.float16, device="cuda")
        given = [*good]
        given[number] = room[1:].view(operand.shape)
        with pytest.raises(Exception, match=r"begins at .*multiples? of 16"):
            main(*given)
    assert (torch.utils.dlpack.from_dlpack(main(*good)) == 1024).all()


def test_other_architecture_is_an_error() -> None:
    vm = relax.VirtualMachine(_bare("vector_add", make_target("rtx4090")), tvm.cuda(0))
    x = _on(tvm.cuda(0), [np.ones(10, "float32")])[0]
    with pytest.raises(RuntimeError, match=r"it was compiled for .* 8\.9; device 0"):
        vm["main"](x, x)


def test_failed_launch_is_an_error() -> None:
    """More cooperative programs than fit the GPU at once: the driver refuses the launch."""
    vm = relax.VirtualMachine(_bare("cooperative", gpu_target()), tvm.cuda(0))
    many = _on(tvm.cuda(0), [np.ones(256 * 100_000, "float32"), np.zeros(1, "float32")])
    message = r"reverse_after_all_\w+: launching a grid of \(100000, 1, 1\).*COOPERATIVE_LAUNCH"
    with pytest.raises(RuntimeError, match=message):
        vm["main"](*many)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_library_made_without_a_gpu(case: Case) -> None:
    """Run a library of `scripts/export_triton_cases.py` with nothing but TVM's runtime."""
    directory = os.environ.get("RELAX_FUSION_EXPORTED")
    if directory is None:
        pytest.skip("needs RELAX_FUSION_EXPORTED, where scripts/export_triton_cases.py wrote")
    inputs = case.inputs(3)
    stem = Path(directory) / case.name
    done = subprocess.run(
        [sys.executable, str(HERE / "run_exported.py"), str(stem)],
        env={**os.environ, "TVM_USE_RUNTIME_LIB": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(f"{stem}.out.npz") as file:
        case.check(inputs, [tvm.runtime.tensor(file[name]) for name in sorted(file.files)], 1)
