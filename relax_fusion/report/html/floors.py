"""The least time that a kernel can take on a device: its roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...errors import RelaxFusionError
from ...estimator import Size
from ...estimator.shape import dtypes_of, sizes_of
from ...hardware import DeviceSpec
from ...workload import Attention, Workload
from ...workload.dims import extent
from ...workload.roofline import matmul_flops


@dataclass(frozen=True)
class Floor:
    """What a kernel has to move and to compute, and how long that takes at the peak rates.

    Parameters
    ----------
    bytes, flops : float
        Every operand counted once, of keys and values those that some query sees; operations of the
        matmuls that no mask by position hides.
    memory_s, compute_s : float
        Bytes over the peak bandwidth, operations over the peak rate; launching is in neither.
    """

    bytes: float
    flops: float
    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        """The larger of the two."""
        return max(self.memory_s, self.compute_s)

    @property
    def limit(self) -> str:
        """Which of the two it is."""
        return "memory" if self.memory_s >= self.compute_s else "compute"

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.bytes if self.bytes else 0.0


def peak_flops(work: Workload, spec: DeviceSpec) -> float:
    """Return the peak rate of a device for the element type of a workload."""
    dtype = getattr(work, "dtype", None) or max(dtypes_of(work), default="float32")
    if spec.kind == "gpu" and (dtype != "float32" or getattr(work, "allow_tf32", False)):
        return spec.tensor_flops_per_s(dtype) or spec.fma_float32_flops_per_s
    return spec.fma_float32_flops_per_s


def floor_of(work: Workload | None, spec: DeviceSpec | None, size: Size) -> Floor | None:
    """Return the floor at a size; None where the device or the workload is not known.

    Of dimensions that the size does not tell, such as the positions of rotated rows, it has one.
    """
    if work is None or spec is None:
        return None
    try:
        sizes = dict.fromkeys(work.graph.dims, 1) | sizes_of(work, size)
        moved = float(sum(_seen(work, sizes).bytes(**sizes).values()))
        flops = float(matmul_flops(work.graph, sizes, visible=True))
    except (RelaxFusionError, TypeError):
        return None
    memory_s = moved / spec.dram_bytes_per_s
    return Floor(moved, flops, memory_s, flops / peak_flops(work, spec))


def _seen(work: Workload, sizes: Mapping[str, int]) -> Workload:
    """Return attention with as many keys as some query sees, another workload as it is."""
    if not isinstance(work, Attention) or work.causal == "none":
        return work
    rows, keys = extent(work.q_len, sizes["q_len"]), extent(work.kv_len, sizes["kv_len"])
    most = rows if work.causal == "top_left" else (work.window or keys) + rows - 1
    return replace(work, kv_len=min(keys, most))
