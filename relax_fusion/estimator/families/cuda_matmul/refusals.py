"""What the matmul kernel in CUDA C++ is not for: devices, dtypes, packed weights and epilogues."""

from __future__ import annotations

from ....hardware.instructions import PIECE_BYTES, WARP_GROUP_MMA
from ....workload import DTYPE_BYTES, INTEGER_DTYPES, GatedFFN, Projection, Rope, per_rows
from ....workload.dtypes import step_dtype
from ...prediction import HALF_DTYPES
from ..matmuls import MatmulProblem, MatmulWork
from ..triton_matmul.tiles import kernel_steps
from .cost import BITS, PIECE
from .tiles import FAMILY, PART, form_of


def refused(problem: MatmulProblem) -> str | None:
    """Return why there is no kernel for a workload on a device."""
    work, shape, capabilities = problem.work, problem.shape, problem.dev.capabilities
    if not (capabilities.tma and capabilities.clusters and capabilities.warp_group_mma):
        return f"family {FAMILY!r} needs TMA and wgmma (sm_90), which the {problem.dev.label} lacks"
    reason = _of_dtypes(problem)
    if reason is not None:
        return reason
    if shape.unpacked_bytes and (reason := _of_packed(problem)):
        return reason
    lanes = PIECE_BYTES // shape.in_bytes
    if work.k % lanes:
        return f"k is {work.k}, rows of a tensor map must be multiples of {lanes} elements"
    reasons = (_of_epilogue(p, work) for p in form_of(work).outputs)
    return next(filter(None, reasons), None)


def _of_dtypes(problem: MatmulProblem) -> str | None:
    """Return why no kernel has such operands and results; None if there may be one."""
    work = problem.work
    dtype, integers = work.dtype, work.dtype in INTEGER_DTYPES
    if dtype not in WARP_GROUP_MMA:
        return f"dtype is {dtype}, family {FAMILY!r} takes {', '.join(WARP_GROUP_MMA)}"
    if dtype == "float32" and not work.allow_tf32:
        return f"dtype is float32, family {FAMILY!r} multiplies it as tf32, which is not allowed"
    if dtype not in HALF_DTYPES and "kn" in problem.shape.layouts:
        return f"weights of {dtype} lie as [k, n], family {FAMILY!r} multiplies them as [n, k]"
    if integers and (isinstance(work, GatedFFN) or work.norm is not None):
        return f"dtype is {dtype}, of which family {FAMILY!r} has matmuls without norms and gates"
    results = _result_dtypes(dtype)
    if work.out_dtype not in results:
        stored = f"family {FAMILY!r} stores {', '.join(results)}"
        return f"results are {work.out_dtype}, {stored} of products of {dtype}"
    return None


def _result_dtypes(dtype: str) -> tuple[str, ...]:
    """Return the dtypes of results that the kernel stores of operands of `dtype`."""
    if dtype in HALF_DTYPES:
        return (dtype, "float32")
    return ("float32", *HALF_DTYPES, *(["int32"] if dtype in INTEGER_DTYPES else []))


def _of_packed(problem: MatmulProblem) -> str | None:
    """Return why packed weights are none that the kernel unpacks."""
    work, layouts = problem.work, problem.shape.layouts
    forms = (work.packed,) if isinstance(work, GatedFFN) else tuple(p.packed for p in work.outputs)
    form = forms[0]
    if form is None or len({*forms}) > 1:
        return f"weights are stored in {len({*forms})} ways, family {FAMILY!r} takes one"
    if "kn" in layouts or form.axis != -1 or not form.is_in_order:
        return f"family {FAMILY!r} unpacks words of neighbours along k, with one zero"
    known = form.bits in BITS and form.number in ("", "int8") and form.lines == 1
    if not known or form.limit is not None or form.scale_dtype != work.dtype:
        what = f"{form.bits} bits, {form.number or 'unsigned'}, scales {form.scale_dtype or 'none'}"
        return f"weights are of {what}; family {FAMILY!r} unpacks integers of 4 and 8 bits"
    if form.group > 0 and form.group % PIECE:
        return f"{form.group} elements share a scale, family {FAMILY!r} takes multiples of {PIECE}"
    if form.zero is None or not 0 <= form.zero < 1 << form.bits:
        return f"the zero is {form.zero}, must be a field of {form.bits} bits"
    if form.words(work.k) * form.fields * form.bits % 128:
        return f"k is {work.k}, lines of packed weights must be multiples of 16 bytes"
    return None


def _of_epilogue(projection: Projection, work: MatmulWork) -> str | None:
    """Return why there is no kernel with such an epilogue."""
    lanes = PIECE_BYTES // DTYPE_BYTES[work.dtype]
    steps = kernel_steps(projection.epilogue)
    own = step_dtype(work.dtype)
    if not isinstance(projection.n, int):
        return f"the weight has {projection.n.name} columns, family {FAMILY!r} is made for a number"
    if projection.layout == "kn" and projection.n % lanes:
        rows = f"rows of a tensor map must be multiples of {lanes} elements"
        return f"n is {projection.n} of weights [k, n], {rows}"
    if projection.n % lanes and form_of(work).rotates:
        return f"n is {projection.n} beside features that turn, of which {lanes} are stored at once"
    if projection.rope is not None:
        return _unrotated(projection, projection.rope, work)
    if projection.adapter is not None and projection.adapter.rank % 8:
        return f"an adapter has rank {projection.adapter.rank}, lines are copied by 8 elements"
    if projection.adapter is not None and work.dtype not in HALF_DTYPES:
        return f"adapters are {work.dtype}, family {FAMILY!r} takes {' and '.join(HALF_DTYPES)}"
    if any(isinstance(step, str) and per_rows(step)[1] for step in projection.epilogue):
        return f"an epilogue has a row for several rows, family {FAMILY!r} has one for all"
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
