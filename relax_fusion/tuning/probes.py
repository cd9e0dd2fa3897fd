"""The kernels by which `calibrate` measures a device: each hangs on few of its rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import Decline
from ..estimator.choose import choose
from ..estimator.tile_plan import TilePlan
from ..hardware import DeviceSpec
from ..workload import GatedFFN, Norm, NormMatmul, Projection

RMS = Norm("rms", 1e-5)


@dataclass(frozen=True)
class Probe:
    """A workload at a number of rows."""

    name: str
    work: NormMatmul | GatedFFN
    rows: int

    def plan(self, dev: DeviceSpec) -> TilePlan | str:
        """Return the best-priced plan in TIR, which TVM alone compiles, or why there is none."""
        choice = choose(self.work, dev, always=True, backend="tir")
        if isinstance(choice, Decline):
            return choice.detail
        return choice.plans.plan_for(self.rows)


def probes(dev: DeviceSpec) -> Iterator[Probe]:
    """Yield the kernels for a device, those first that tell most."""
    yield from _on_cpu() if dev.kind == "cpu" else _on_gpu(dev)


def _matmul(
    sizes: tuple[int, int, int], dtype: str, parts: int = 1, norm: Norm | None = None
) -> NormMatmul:
    rows, k, n = sizes
    out = "int32" if dtype == "int8" else dtype
    outputs = tuple(Projection(n // parts, "nk") for _ in range(parts))
    return NormMatmul(rows, k, outputs, norm, dtype, out)


def named(sizes: tuple[int, int, int], dtype: str) -> Probe:
    """Return a matmul of so many rows, k and columns."""
    name = f"{'x'.join(map(str, sizes))} {dtype}"
    return Probe(name, _matmul(sizes, dtype), sizes[0])


def _on_cpu() -> Iterator[Probe]:
    """Yield matmuls: one parallel region and four, by memory, by caches, by arithmetic.

    Weights of those that wait for memory are larger than third-level caches.
    """
    dtype = "float32"
    yield named((1, 64, 64), dtype)
    yield Probe("1x64x192 in four regions", _matmul((1, 64, 192), dtype, 3, RMS), 1)
    yield named((1, 8192, 8192), dtype)
    for sizes in ((256, 1024, 1024), (64, 1024, 4096), (16, 1024, 1024)):
        yield named(sizes, dtype)
    gated = GatedFFN(64, 1024, 2048, "nk", True, True, "silu", RMS, dtype, dtype)
    yield Probe("64x1024x2048 gated", gated, 64)
    for sizes in ((4, 8192, 8192), (128, 4096, 1024), (256, 512, 512), (64, 256, 256)):
        yield named(sizes, dtype)


def _on_gpu(dev: DeviceSpec) -> Iterator[Probe]:
    """Yield matmuls: by the launch, by memory, by each unit that multiplies, and by their waves.

    Weights of those that wait for memory are twice as large as second-level caches.
    """
    half = "float16"
    yield named((1, 64, 64), half)
    for sizes in ((1, 8192, 8192), (4096, 4096, 4096), (1024, 4096, 4096)):
        yield named(sizes, half)
    yield named((1024, 2048, 2048), "float32")
    for dtype in ("bfloat16", "int8"):
        if dev.tensor_flops_per_s(dtype):
            yield named((4096, 4096, 4096), dtype)
    for sizes in ((16, 8192, 14336), (512, 4096, 4096), (64, 8192, 14336)):
        yield named(sizes, half)
    yield named((256, 1024, 1024), "float32")
    yield named((2048, 1024, 1024), half)
