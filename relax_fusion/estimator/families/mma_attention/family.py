"""Attention by tensor cores: the family "mma" of attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ....hardware import DeviceSpec
from ....workload import Attention
from ...family import Breaks, Footprint, KernelFamily
from ...limits import block_limits, vector_loads
from ...prediction import Prediction
from ...shape import Size, attention_size
from ...tile_plan import TilePlan
from ..attention_tiles import head_extents, holds_features
from ..fma_attention.family import FmaAttention
from ..tensor_cores import tiles as mma
from . import cost as mma_attention_cost
from . import tiles as mma_attention


class MmaAttention(KernelFamily[Attention]):
    """A block has a tile of query rows; tensor cores multiply what lies in shared memory."""

    names = (mma.FAMILY,)
    takes = (Attention,)
    emitter = "relax_fusion.dlight_rules.tensor_cores.attention:emit"
    error = 1.2
    instead_of = (FmaAttention,)
    breaks = Breaks((1, 16, 64, 256, 512, 1024), 4096, (32, 8, 1))

    def refuses(self, work: Attention, dev: DeviceSpec) -> str | None:
        """Refuse dtypes, features and devices that its instructions are not for."""
        return mma_attention.unsupported(work, dev)

    def plans(self, work: Attention, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield tiles of rows and keys, few rows with the keys in parts."""
        return mma_attention.candidates(work, dev)

    def worth(
        self, plans: Sequence[TilePlan], work: Attention, dev: DeviceSpec, rows: tuple[int, int]
    ) -> Iterable[TilePlan]:
        """Offer tiles of 64 rows at any size: they cost no more than fewer."""
        return (p for p in plans if p.block_m <= max(rows[1], mma.GROUP_ROWS))

    def violations(self, plan: TilePlan, work: Attention, dev: DeviceSpec) -> Iterator[str]:
        """Yield what fragments and copies ask for, and what a block has not."""
        yield from mma_attention.violations(plan, work, dev)
        yield from holds_features(plan, work)
        yield from block_limits(self.footprint(plan, work, dev), plan, work, dev)
        yield from vector_loads(plan, work.dtype, head_extents(work))

    def footprint(self, plan: TilePlan, work: Attention, dev: DeviceSpec) -> Footprint:
        """Return the stages of keys and values, and the fragments of a thread."""
        threads = plan.num_warps * dev.warp_size
        smem = mma_attention.smem_bytes(plan, work)
        return Footprint(smem, mma_attention.registers(plan, work), threads)

    def predict(self, plan: TilePlan, work: Attention, dev: DeviceSpec, size: Size) -> Prediction:
        """Return what the kernels of `plan` cost."""
        foot = self.footprint(plan, work, dev)
        return mma_attention_cost.predict(work, plan, foot, dev, attention_size(work, size))
