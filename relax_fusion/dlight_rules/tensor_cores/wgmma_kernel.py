"""The body of a tensor-core kernel for sm_90: copies as everywhere, products by ``wgmma``.

Four warps together multiply 64 rows by all columns of the tile, straight from shared memory, and
go on while they are at it.  A lane then holds the sums that ``mma`` would leave in it.
"""

from __future__ import annotations

from tvm import tirx
from tvm.backend.cuda.op import cuda_cvta_generic_to_shared, cuda_func_call

from ...estimator.families.tensor_cores.tiles import (
    GROUP_ALIGNMENT_BYTES,
    GROUP_LINE_BYTES,
    GROUP_ROWS,
    GROUP_WARPS,
)
from ...hardware.instructions import SLICE_BYTES
from ...tvm_ir import T
from .fragments import local, ptx, round_registers
from .layout import LANES
from .mma_kernel import READ, MmaKernel
from .tile import int32, uint32

UNIT_BYTES = 16
"""Addresses in a descriptor are in units of this many bytes."""

ATOM_BYTES = 8 * GROUP_LINE_BYTES
"""The swizzle repeats after eight lines, which take this many bytes."""

AT_ONCE = 4
"""Copies that a thread rounds at once: their loads do not wait for one another."""

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
        if self.types.rounds:
            self.words = local("words", AT_ONCE * self.tile.plan.lanes, "uint32")
            T.evaluate(ptx["cp.async.wait_group"](ahead - 1))
            self._round()
        with T.serial(int32(self.steps)) as step:
            if not self.types.rounds:
                T.evaluate(ptx["cp.async.wait_group"](ahead - 1))
            # What copies wrote is read by another path to memory.
            T.evaluate(ptx["fence.proxy.async.shared::cta"]())
            T.evaluate(tirx.op.tvm_storage_sync("shared.dyn"))
            self._products()
            self._next_stage(READ)
            self._copy_ahead(step, ahead)
            if self.types.rounds:  # while this step is multiplied
                T.evaluate(ptx["cp.async.wait_group"](ahead - 1))
                with T.If(step + int32(1) < int32(self.steps)), T.Then():
                    self._round()
            T.evaluate(ptx["wgmma.wait_group.sync.aligned"](1))
        T.evaluate(ptx["wgmma.wait_group.sync.aligned"](0))
        self._tie()

    def _tie(self) -> None:
        """Let nothing read a sum before the wait that is above.

        To a compiler the wait has nothing to do with the registers (PTX ISA, section
        "Asynchronous wgmma": to access them before it is undefined).
        """
        kind, constraint = ("float", "f") if self.types.total == "float32" else ("unsigned", "r")
        name = f"after_wait_{kind}"
        source = (
            f"__forceinline__ __device__ void {name}({kind}& sum) {{\n"
            f'  asm volatile("" : "+{constraint}"(sum) :: "memory");\n}}\n'
        )
        for i in range(self.sums):
            T.evaluate(cuda_func_call(name, self.acc[i], source_code=source))

    def _round(self) -> None:
        """Round what this thread has copied of the step that is read next, in place."""
        plan, lanes, base = self.tile.plan, self.tile.plan.lanes, self.stages[READ]
        tiles = [(base, plan.block_m)]
        for part in range(self.tile.parts):
            tiles.append((base + uint32(self.part_offset(part)), plan.block_n))
        copies = [
            at
            for first, lines in tiles
            for _, _, at in self.own_copies(first, (lines, plan.block_k), self.weights.place)
        ]
        vector = f"v{lanes}." if lanes > 1 else ""
        for first in range(0, len(copies), AT_ONCE):
            several = list(enumerate(copies[first : first + AT_ONCE]))
            words = [[self.words[i * lanes + e] for e in range(lanes)] for i, _ in several]
            for i, at in several:
                T.evaluate(ptx[f"ld.shared.{vector}b32"](*words[i], at))
            round_registers(self.words, range(len(several) * lanes))
            for i, at in several:
                T.evaluate(ptx[f"st.shared.{vector}b32"](at, *words[i]))

    def _first_address(self) -> tirx.Expr:
        """Return the address of the first stage, rounded up to the next atom."""
        unit = uint32(GROUP_ALIGNMENT_BYTES)
        address = cuda_cvta_generic_to_shared(self.whole) + uint32(GROUP_ALIGNMENT_BYTES - 1)
        return address // unit * unit

    def _products(self) -> None:
        """Begin the products of a step."""
        tile, stage = self.tile, self.stages[READ]
        group = self.thread // int32(GROUP_WARPS * LANES)
        rows = stage + (group * int32(GROUP_ROWS * GROUP_LINE_BYTES)).astype("uint32")
        columns = stage + uint32(self.part_offset(0))
        whole = tile.parts * tile.plan.block_n
        width = self.types.columns(whole)
        multiply = ptx[self.types.wgmma(width)]
        sums = [self.acc[i] for i in range(self.sums)]
        each = self.sums * width // whole
        T.evaluate(ptx["wgmma.fence.sync.aligned"]())
        for index in range(self.slices):
            skip = index * SLICE_BYTES
            for part in range(whole // width):
                place = part * width * GROUP_LINE_BYTES + skip
                a, b = _descriptor(rows, skip), _descriptor(columns, place)
                own = sums[part * each : (part + 1) * each]
                T.evaluate(multiply(*own, a, b, True, *self.types.flags))
        T.evaluate(ptx["wgmma.commit_group.sync.aligned"]())


def _descriptor(address: tirx.Expr, skip: int) -> tirx.Expr:
    """Return the matrix descriptor of lines in shared memory: an address is less than its fields.

    An addition of 64 bits would be two, of which the second waits for the first.
    """
    units = address // uint32(UNIT_BYTES) + uint32(skip // UNIT_BYTES)
    return tirx.bitwise_or(tirx.const(DESCRIPTOR, "uint64"), units.astype("uint64"))
