"""What TVM 0.27's front ends write and its back ends do not take, or take for something else."""

from __future__ import annotations

import numpy as np
from tvm import ir, relax, tirx

from ..matching.operators import MOVEMENTS, OPERATORS, named
from ..matching.pattern import is_call
from ..matching.shapes import dtype_of, is_one, same_shape, shape_of
from ..transforms.modules import module_pass
from ..tvm_ir import GenericConst
from .rewriter import Rewriter, Rule, canonicalise


@module_pass
class MendImports:
    """Write what front ends mean where TVM 0.27 reads something else, or nothing.

    rewrite::

        c = R.cumsum(x)                        # of bool: PyTorch counts, TVM keeps bool
        y = R.equal(c[i], c[j])                # LLVM has no sum of bools
            ->
        c = R.cumsum(x, dtype="int64")
        y = R.equal(c[i], c[j])

        y = R.take(x, -2, axis=1, mode="fast")      # counted from the end; no mode of take does
            ->
        y = R.take(x, n - 2, axis=1, mode="clip")   # a slice, where n is known to be 2 or more

        y = R.slice_scatter(R.slice_scatter(z, a, 0, 4, 1, axis=1), b, 4, 8, 1, axis=1)
            ->
        y = R.concat((a, b), axis=1)           # where that is all of the axis

        y = R.tile(x, [b, 1])                  # of axes of size 1; also repeat
            ->
        y = R.broadcast_to(x, [b, n])

        y = R.take(x, (R.arange(n) + 2) % n, axis=1)        # what torch.roll is
            ->
        y = R.concat((x[:, 2:], x[:, :2]), axis=1)

        y = R.nn.pad(x, [0, 0, 0, 0])          # by nothing, in any mode
            ->
        y = x
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        return canonicalise(mod, IMPORTS)


def _compared(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Compare numbers of elements, where bools that are no such numbers are compared."""
    if any(dtype_of(arg) != "bool" for arg in call.args):
        return None
    counts = [_counted(rewriter, arg) for arg in call.args]
    if any(count is None for count in counts):
        return None
    return relax.Call(call.op, counts, call.attrs)


def _counted(rewriter: Rewriter, expr: relax.Expr) -> relax.Expr | None:
    """Return a moved `cumsum` of bools as a sum of integers."""
    sums = rewriter.call(expr, "relax.cumsum")
    if sums is not None:
        attrs = sums.attrs
        axis = None if attrs.axis is None else int(attrs.axis)
        exclusive = bool(attrs.exclusive)
        return rewriter.emit(relax.op.cumsum(sums.args[0], axis, "int64", exclusive))
    moved = rewriter.call(expr, *MOVEMENTS, *named("lookup", "gather"))
    source = _counted(rewriter, moved.args[0]) if moved is not None else None
    if moved is None or source is None:
        return None
    return rewriter.emit(relax.Call(moved.op, [source, *moved.args[1:]], moved.attrs))


def _take(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Count constant indices from the front, and let one beyond the end read the last place.

    Modes that say what others stand for are followed.
    """
    x, indices = call.args
    array, shape = _constant(rewriter, indices), shape_of(x)
    if array is None or shape is None or call.attrs.axis is None:
        return rolled(rewriter, call)
    mode = call.attrs.mode
    if array.size and (mode == "wrap" or (mode == "clip" and array.min() < 0)):
        size = shape[int(call.attrs.axis) % len(shape)]
        if not isinstance(size, tirx.IntImm) or not int(size):
            return None
        last = int(size) - 1
        inside = array.clip(0, last) if mode == "clip" else array % int(size)
        if (inside != array).any():
            inside = relax.const(inside, str(array.dtype))
            return relax.op.take(x, inside, int(call.attrs.axis), mode)
    part = one_place(rewriter, call)
    part = rolled(rewriter, call) if part is None else part
    if part is not None:
        return part
    if not np.issubdtype(array.dtype, np.signedinteger) or not array.size:
        return None
    axis, dtype, below = int(call.attrs.axis) % len(shape), str(array.dtype), indices
    if array.min() >= 0:
        if mode == "clip":
            return None
    elif isinstance(shape[axis], tirx.IntImm):
        if array.min() < -int(shape[axis]):
            return None
        below = relax.const(np.where(array < 0, array + int(shape[axis]), array), dtype)
    else:
        sizes = rewriter.emit(relax.op.shape_to_tensor(rewriter.emit(relax.op.shape_of(x))))
        size = rewriter.emit(relax.op.strided_slice(sizes, [0], [axis], [axis + 1]))
        size = rewriter.emit(relax.op.reshape(rewriter.emit(relax.op.astype(size, dtype)), []))
        added = relax.op.multiply(relax.const(array < 0, dtype), size)
        below = rewriter.emit(relax.op.add(rewriter.emit(added), below))
    return relax.op.take(x, below, axis, "clip")


def _constant(rewriter: Rewriter, expr: relax.Expr) -> np.ndarray | None:
    value = rewriter.definition(expr)
    return value.value.numpy() if isinstance(value, GenericConst) else None


def one_place(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Return one constant place of an axis as a slice, which the axis is left out of for a number.

    None if there may be no such place.
    """
    array, shape, before = _constant(rewriter, call.args[1]), shape_of(call), shape_of(call.args[0])
    if array is None or array.size != 1 or array.ndim > 1 or call.attrs.axis is None:
        return None
    if not shape or not before:
        return None
    axis, first = int(call.attrs.axis) % len(before), tirx.IntImm("int64", int(array.item()))
    first = first + before[axis] if int(first) < 0 else first
    if not all(map(rewriter.sizes.can_prove, (first >= 0, first < before[axis]))):
        return None
    part = relax.op.strided_slice(call.args[0], [axis], [first], [first + 1], assume_inbound=True)
    return relax.op.reshape(rewriter.emit(part), shape)


def _repeated(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Broadcast what is repeated along axes of size 1 only."""
    before, after = shape_of(call.args[0]), shape_of(call)
    if before is None or after is None or len(before) > len(after):
        return None
    kept = zip([tirx.IntImm("int64", 1)] * (len(after) - len(before)) + before, after, strict=True)
    if any(not same_shape([a], [b]) and not is_one(a) for a, b in kept):
        return None
    return relax.op.broadcast_to(call.args[0], after)


def _scattered(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Lay slices side by side that are put over the whole of an axis, one after the other."""
    shape, axis = shape_of(call), int(call.attrs.axis)
    parts: list[tuple[int, int, relax.Expr]] = []
    value: relax.Expr = call
    while shape and is_call(value, "relax.slice_scatter") and int(value.attrs.axis) == axis:
        found = _put(value, shape[axis])
        if found is None or any(found[0] < end and begin < found[1] for begin, end, _ in parts):
            break  # of one that is put over by a later one, a part may be left
        parts.append(found)
        value = rewriter.definition(value.args[0])
    parts.sort(key=lambda part: part[0])
    begins, ends = [p[0] for p in parts], [p[1] for p in parts]
    if not shape or len(parts) < 2 or [*begins, int(shape[axis])] != [0, *ends]:
        return None
    return relax.op.concat([part for _, _, part in parts], axis)


def _put(call: relax.Call, size: tirx.Expr) -> tuple[int, int, relax.Expr] | None:
    """Return where along an axis neighbouring places are replaced, and by what."""
    _, part, *where = call.args
    if not isinstance(size, tirx.IntImm) or not all(isinstance(w, tirx.IntImm) for w in where):
        return None
    begin, end, step = map(int, where)
    end = min(end, int(size))
    return (begin, end, part) if step == 1 and 0 <= begin < end else None


def _padded(_: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Leave out a pad of nothing."""
    return None if any(int(width) for width in call.attrs.pad_width) else call.args[0]


IMPORTS: dict[str, Rule] = {
    "relax.equal": _compared,
    "relax.not_equal": _compared,
    "relax.slice_scatter": _scattered,
    "relax.nn.pad": _padded,
    "relax.take": _take,
    "relax.tile": _repeated,
    "relax.repeat": _repeated,
}


def numbers(rewriter: Rewriter, expr: relax.Expr) -> np.ndarray | None:
    """Return the whole numbers that a tensor of constants and counted numbers has."""
    value = rewriter.definition(expr)
    if "int" not in dtype_of(expr):
        return None
    if isinstance(value, GenericConst):
        return value.value.numpy()
    if rewriter.call(expr, "relax.arange") is not None:
        static = all(isinstance(number, tirx.IntImm) for number in value.args)
        return np.arange(*map(int, value.args), dtype=dtype_of(expr)) if static else None
    if rewriter.call(expr, *named("arithmetic")) is None:
        return None
    operator = OPERATORS[value.op.name.removeprefix("relax.")].numpy
    operands = [numbers(rewriter, arg) for arg in value.args]
    if operator is None or any(operand is None for operand in operands):
        return None
    made = np.asarray(operator(*operands))
    return made if str(made.dtype) == dtype_of(expr) else None


def rolled(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Return rows by number as a slice, or as two that are joined, None if they are more runs."""
    shape, places = shape_of(call.args[0]), numbers(rewriter, call.args[1])
    if shape is None or places is None or places.ndim != 1 or call.attrs.axis is None:
        return None
    axis = int(call.attrs.axis) % len(shape)
    if not isinstance(shape[axis], tirx.IntImm) or not places.size:
        return None
    if places.min() < 0 or places.max() >= int(shape[axis]):
        return None
    runs = np.split(places, 1 + np.flatnonzero(np.diff(places) != 1))
    if len(runs) > 2:
        return None
    parts = [
        relax.op.strided_slice(
            call.args[0], [axis], [int(run[0])], [int(run[-1]) + 1], assume_inbound=True
        )
        for run in runs
    ]
    return parts[0] if len(parts) == 1 else relax.op.concat([*map(rewriter.emit, parts)], axis)
