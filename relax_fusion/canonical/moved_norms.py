"""Canonical movements: rows are moved first, and normalised where a projection reads them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tvm import ir, relax

from ..matching.bindings import Identity, items_of
from ..matching.effects import Memory, reads_of
from ..matching.expressions import substitute
from ..matching.pattern import is_call
from ..matching.shapes import permutation, same_shape, shape_of
from ..transforms.modules import module_pass
from .rewriter import same_type, with_blocks

_NORMS = ("relax.nn.rms_norm", "relax.nn.layer_norm")
_MOVEMENTS = ("relax.reshape", "relax.permute_dims", "relax.concat", "relax.strided_slice")


@module_pass
class MoveNorms:
    """Normalise rows behind what moves them, in front of the matmuls that read them.

    rewrite::

        n = R.nn.layer_norm(x, g, b, axes=[-1])
        w = R.permute_dims(R.reshape(n, [b, h, 7, w, 7, c]), [0, 1, 3, 2, 4, 5])   # windows
        y = R.matmul(w, weight)
            ->
        w = R.permute_dims(R.reshape(x, [b, h, 7, w, 7, c]), [0, 1, 3, 2, 4, 5])
        y = R.matmul(R.nn.layer_norm(w, g, b, axes=[-1]), weight)

    The movements are transposes, reshapes, slices and concatenations that leave the last axis as it
    is: they take as long of `x`, and the norm becomes part of the projection.

    declines when:
        anything but the movements reads the norm; anything but matmuls reads what they make; there
        are only reshapes; more than one tensor comes of them; something writes to `x`.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        return with_blocks(mod, _moved)


def _moved(
    block: relax.DataflowBlock, memory: Memory, builder: relax.BlockBuilder
) -> list[relax.Binding] | None:
    """Return the bindings of a block with its norms moved, None if there is none to move."""
    bindings, found = items_of(block.bindings), False
    for norm in bindings:
        last = _last(norm, bindings, memory)
        if last is None:
            continue
        found, made = True, list[relax.Binding]()
        names = {norm.var: norm.value.args[0]}
        for binding in bindings:
            value = substitute(binding.value, names)
            if binding.var.same_as(last):
                moved = relax.DataflowVar("moved", last.ty)
                made.append(relax.VarBinding(moved, value))
                value = relax.Call(norm.value.op, [moved, *norm.value.args[1:]], norm.value.attrs)
            if binding.var.same_as(norm.var):
                continue
            same = value.same_as(binding.value)
            made.append(
                binding if same else relax.VarBinding(binding.var, builder.normalize(value))
            )
        bindings = made
    return bindings if found else None


def _last(
    norm: relax.Binding, bindings: Sequence[relax.Binding], memory: Memory
) -> relax.Var | None:
    """Return what matmuls read of the moved rows of a norm, None if the norm is to stay."""
    call = norm.value
    if not is_call(call, *_NORMS) or not isinstance(norm.var, relax.DataflowVar):
        return None
    rank = len(shape_of(call) or ())
    if not rank or [int(axis) % rank for axis in call.attrs.axes] != [rank - 1]:
        return None
    if not same_type(call, call.args[0]) or not memory.is_constant(call.args[0]):
        return None
    rows, ends, turned = {hash(norm.var)}, set(), False
    for binding in bindings:
        read = {hash(v) for v in reads_of(binding.value)} & rows
        if not read:
            continue
        if _moves_rows(binding, read):
            rows.add(hash(binding.var))
            turned = turned or not is_call(binding.value, "relax.reshape")
        elif is_call(binding.value, "relax.matmul") and _is_rows(binding.value, read):
            ends |= read
        else:
            return None
    by_hash = {hash(b.var): b.var for b in bindings}
    return by_hash[ends.pop()] if turned and len(ends) == 1 else None


def _moves_rows(binding: relax.Binding, rows: Collection[Identity]) -> bool:
    """Tell whether a binding moves rows, all that it reads, and leaves the last axis as it is."""
    call, shape = binding.value, shape_of(binding.var)
    plain = isinstance(binding.var, relax.DataflowVar) and isinstance(binding, relax.VarBinding)
    if not plain or not shape or len(shape) < 2 or not is_call(call, *_MOVEMENTS):
        return False
    last = len(shape) - 1
    if not all(hash(operand) in rows for operand in reads_of(call)):
        return False
    if is_call(call, "relax.reshape"):
        return same_shape((shape_of(call.args[0]) or [])[-1:], shape[-1:])
    if is_call(call, "relax.permute_dims"):
        return permutation(call, last + 1)[last] == last
    if is_call(call, "relax.concat"):
        return call.attrs.axis is not None and int(call.attrs.axis) % (last + 1) != last
    return all(int(axis) % (last + 1) != last for axis in call.args[1].fields)


def _is_rows(call: relax.Call, read: Collection[Identity]) -> bool:
    """Tell whether a matmul multiplies rows by a matrix."""
    x, weight = call.args
    return hash(x) in read and hash(weight) not in read and len(shape_of(weight) or ()) == 2
