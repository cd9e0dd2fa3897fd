"""What the matmul kernel in CUDA C++ has no epilogue for."""

from __future__ import annotations

from ....hardware.instructions import PIECE_BYTES
from ....workload import DTYPE_BYTES, GatedFFN, Projection, Rope
from ....workload.dtypes import step_dtype
from ...prediction import HALF_DTYPES
from ..matmuls import MatmulWork
from ..triton_matmul.tiles import kernel_steps
from .tiles import FAMILY, PART


def refused(projection: Projection, work: MatmulWork) -> str | None:
    """Return why there is no kernel with such an epilogue."""
    lanes = PIECE_BYTES // DTYPE_BYTES[work.dtype]
    steps = kernel_steps(projection.epilogue)
    own = step_dtype(work.dtype)
    if not isinstance(projection.n, int):
        return f"the weight has {projection.n.name} columns, family {FAMILY!r} is made for a number"
    if projection.layout == "kn" and projection.n % lanes:
        rows = f"rows of a tensor map must be multiples of {lanes} elements"
        return f"n is {projection.n} of weights [k, n], {rows}"
    if projection.n % lanes and any(each.rope for each in projections(work)):
        return f"n is {projection.n} beside features that turn, of which {lanes} are stored at once"
    if projection.rope is not None:
        return _unrotated(projection, projection.rope, work)
    if projection.adapter is not None and projection.adapter.rank % 8:
        return f"an adapter has rank {projection.adapter.rank}, lines are copied by 8 elements"
    if projection.adapter is not None and work.dtype not in HALF_DTYPES:
        return f"adapters are {work.dtype}, family {FAMILY!r} takes {' and '.join(HALF_DTYPES)}"
    if steps.count("residual") > 1:
        return f"an epilogue has several residuals, family {FAMILY!r} adds one"
    if "residual" in steps and own != work.out_dtype:
        return f"a residual is {own}, results are {work.out_dtype}; must be of one dtype"
    if projection.epilogue and work.out_dtype == "int32":
        return f"results are int32, of which family {FAMILY!r} stores sums without steps"
    return None


def _unrotated(projection: Projection, rope: Rope, work: MatmulWork) -> str | None:
    """Return why the kernel cannot rotate features: it turns eight of a row at a time."""
    if work.dtype not in HALF_DTYPES or work.out_dtype != work.dtype:
        types = f"of {work.dtype} to {work.out_dtype}"
        return f"family {FAMILY!r} rotates results of {' and '.join(HALF_DTYPES)}, none {types}"
    if projection.adapter is not None or projection.packed is not None:
        return f"family {FAMILY!r} rotates a matmul whose weight is not packed, without an adapter"
    if set(projection.epilogue) - {"bias"}:
        return f"family {FAMILY!r} rotates a matmul with a bias, and with no other step before it"
    apart, period = rope.distance, rope.period or projection.columns
    pairs = f"pairs of rotated features are {apart} apart"
    if apart > 1 and projection.layout == "kn" and apart % PART:
        return f"{pairs}, of weights [k, n] it must be a multiple of {PART}"
    if apart > 1 and apart % 8:
        return f"{pairs}, family {FAMILY!r} needs a multiple of 8"
    if apart > 1 and projection.columns % (2 * apart):
        return f"n is {projection.columns}, {pairs}: must be a multiple of {2 * apart}"
    if rope.head_dim % 8 or rope.width % 8 or period % 8:
        sizes = f"{rope.width} features of heads of {rope.head_dim}, each {period},"
        return f"{sizes} are rotated, family {FAMILY!r} needs multiples of 8"
    if rope.dtype not in ("float32", work.dtype):
        return f"angles are {rope.dtype}, family {FAMILY!r} takes float32 and {work.dtype}"
    return None


def projections(work: MatmulWork) -> tuple[Projection, ...]:
    """Return what is stored: of a gated pair, its product."""
    if isinstance(work, GatedFFN):
        return (Projection(work.n, work.layout),)
    return work.outputs
