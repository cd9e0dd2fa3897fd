"""The body of a tensor-core kernel for sm_90: copies as everywhere, products by ``wgmma``.

Four warps together multiply 64 rows by all columns of the tile, straight from shared memory, and
go on while they are at it.  A lane then holds the sums that ``mma`` would leave in it.
"""

from __future__ import annotations

from tvm import tirx
from tvm.backend.cuda.op import cuda_cvta_generic_to_shared
from tvm.script.ir_builder import tirx as T

from ...estimator.mma import (
    GROUP_ALIGNMENT_BYTES,
    GROUP_LINE_BYTES,
    GROUP_ROWS,
    GROUP_WARPS,
    SLICE_BYTES,
)
from .fragments import ptx
from .layout import LANES
from .mma_kernel import MmaKernel
from .tile import int32

ATOM_BYTES = 8 * GROUP_LINE_BYTES
"""Of the eight lines after which the swizzle repeats."""

DESCRIPTOR = 1 << 62 | ATOM_BYTES >> 4 << 32 | 1 << 16
"""A matrix descriptor without its address: pieces swizzled over 128 bytes, eight lines to an atom
(PTX ISA, section "Matrix Descriptor Format"; the third field is not used with such lines)."""


class WgmmaKernel(MmaKernel):
    """An `MmaKernel` whose products are ``wgmma`` instructions; weights are ``[n, k]``.

    The plan's warps have 16 rows and all columns, its steps are one line (128 bytes) deep.
    """

    padding_bytes = GROUP_ALIGNMENT_BYTES

    def accumulate(self) -> None:
        """Emit the whole reduction."""
        ahead = self.tile.plan.num_stages - 2
        self._clear()
        self._copy_first(ahead)
        with T.serial(int32(self.steps)) as step:
            T.evaluate(ptx["cp.async.wait_group"](ahead - 1))
            # What copies wrote is read by another path to memory.
            T.evaluate(ptx["fence.proxy.async.shared::cta"]())
            T.evaluate(tirx.op.tvm_storage_sync("shared.dyn"))
            self._products(step)
            self._copy_ahead(step, ahead)
            T.evaluate(ptx["wgmma.wait_group.sync.aligned"](1))
        T.evaluate(ptx["wgmma.wait_group.sync.aligned"](0))

    def _first_address(self) -> tirx.Expr:
        """Return the address of the first stage, rounded up to the next atom."""
        unit = tirx.const(GROUP_ALIGNMENT_BYTES, "uint32")
        address = cuda_cvta_generic_to_shared(self.whole) + tirx.const(
            GROUP_ALIGNMENT_BYTES - 1, "uint32"
        )
        return address // unit * unit

    def _products(self, step: tirx.Var) -> None:
        """Begin the products of a step."""
        tile, stages = self.tile, int32(self.tile.plan.num_stages)
        stage = self.stage_address(step % stages)
        group = self.thread // int32(GROUP_WARPS * LANES)
        rows = stage + (group * int32(GROUP_ROWS * GROUP_LINE_BYTES)).astype("uint32")
        columns = stage + tirx.const(self.part_offset(0), "uint32")
        whole = tile.parts * tile.plan.block_n
        width = self.types.columns(whole)
        multiply = ptx[self.types.wgmma(width)]
        sums = [self.acc[i] for i in range(self.sums)]
        each = self.sums * width // whole
        T.evaluate(ptx["wgmma.fence.sync.aligned"]())
        for index in range(self.slices):
            skip = tirx.const(index * SLICE_BYTES, "uint32")
            for part in range(whole // width):
                place = tirx.const(part * width * GROUP_LINE_BYTES + index * SLICE_BYTES, "uint32")
                a, b = _descriptor(rows + skip), _descriptor(columns + place)
                own = sums[part * each : (part + 1) * each]
                T.evaluate(multiply(*own, a, b, True, *self.types.flags))
        T.evaluate(ptx["wgmma.commit_group.sync.aligned"]())


def _descriptor(address: tirx.Expr) -> tirx.Expr:
    """Return the matrix descriptor of the lines at an address in shared memory."""
    units = (address // tirx.const(16, "uint32")).astype("uint64")
    return tirx.const(DESCRIPTOR, "uint64") + units
