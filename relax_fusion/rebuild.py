"""Rebuilding a block around kernels: their order, and the reshapes that they need."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from tvm import ir, relax

from .pattern import BlockView, KernelArg, KernelOut, Match, free_vars, is_call
from .shapes import same_shape, shape_of


@dataclass
class Kernel:
    """An accepted match and the PrimFunc that computes it."""

    match: Match
    gvar: ir.GlobalVar


def order(view: BlockView, matches: list[Match]) -> list[Match | int] | None:
    """Order kernels and the remaining bindings so that each comes after what it reads.

    The original order is kept where it can be.  A call that overwrites its argument in place stays
    behind everything that reads the old value.  None if the matches depend on each other in a ring.
    """
    owner: dict[int, int] = {}
    for number, match in enumerate(matches):
        owner.update({view.index[v]: -1 - number for v in match.covers})
    items = sorted({owner.get(i, i) for i in range(len(view.bindings))})
    position: dict[int, int] = {}
    for i, number in owner.items():
        position[number] = min(i, position.get(number, i))
    needs: dict[int, set[int]] = {item: set() for item in items}
    for i, binding in enumerate(view.bindings):
        me = owner.get(i, i)
        before = [view.index[v] for v in view.reads[binding.var] if v in view.index]
        for v in overwritten_by(binding.value):
            before += [view.index[u] for u in view.uses(v) if view.index[u] < i]
            needs[me] |= _kernels_that_look_through(view, matches, v, i)
        needs[me] |= {owner.get(j, j) for j in before} - {me}
    return _topological(items, needs, position, matches)


def _kernels_that_look_through(
    view: BlockView, matches: list[Match], var: relax.Var, writer: int
) -> set[int]:
    """Return the kernels that read `var` in place of an earlier copy of it, such as a transpose."""
    if not any(view.index[u] < writer for u in view.uses(var)):
        return set()
    found = set()
    for number, match in enumerate(matches):
        late = any(u in match.covers and view.index[u] > writer for u in view.uses(var))
        if not late and any(var in free_vars(arg.expr) for arg in match.args):
            found.add(-1 - number)
    return found


def _topological(
    items: list[int],
    needs: dict[int, set[int]],
    position: dict[int, int],
    matches: list[Match],
) -> list[Match | int] | None:
    readers: dict[int, list[int]] = {item: [] for item in items}
    for item, before in needs.items():
        for other in before:
            readers[other].append(item)
    waiting = {item: len(before) for item, before in needs.items()}
    ready = [(position.get(item, item), item) for item in items if not waiting[item]]
    heapq.heapify(ready)
    in_order: list[Match | int] = []
    while ready:
        _, item = heapq.heappop(ready)
        in_order.append(matches[-1 - item] if item < 0 else item)
        for reader in readers[item]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (position.get(reader, reader), reader))
    return in_order if len(in_order) == len(items) else None


def overwritten_by(value: relax.Expr) -> list[relax.Var]:
    """Return the variables whose storage a call writes in place."""
    if not is_call(value, "relax.call_tir_inplace"):
        return []
    args = value.args[1].fields
    return [args[int(i)] for i in value.attrs.inplace_indices if int(i) >= 0]


def rebuild(view: BlockView, kernels: list[Kernel]) -> relax.DataflowBlock:
    """Emit the block with kernels in place of the bindings that they cover."""
    emitter = _Emitter(view)
    by_match = {id(k.match): k for k in kernels}
    in_order = order(view, [k.match for k in kernels])
    assert in_order is not None, "matches were checked to be orderable"
    for item in in_order:
        if isinstance(item, int):
            emitter.bindings.append(view.bindings[item])
        else:
            emitter.kernel(by_match[id(item)])
    return relax.DataflowBlock(emitter.bindings)


class _Emitter:
    """Writes the bindings around a kernel: reshapes to its shapes, the call, and back."""

    def __init__(self, view: BlockView):
        self.view = view
        self.bindings: list[relax.Binding] = []
        self.builder = relax.BlockBuilder()
        self.flat: dict[relax.Var, relax.Var] = {}

    def kernel(self, kernel: Kernel) -> None:
        """Emit one kernel call with the reshapes that it needs, and what follows it."""
        match = kernel.match
        args = [self._arg(a) for a in match.args]
        types = [relax.TensorType(o.shape, o.dtype, vdevice=o.var.ty.vdevice) for o in match.outs]
        call = relax.op.call_tir(kernel.gvar, relax.Tuple(args), types)
        if len(match.outs) == 1:
            self._result(call, match.outs[0])
        else:
            packed = self._bind(call, "fused")
            for index, out in enumerate(match.outs):
                self._result(relax.TupleGetItem(packed, index), out)
        self.bindings += [relax.VarBinding(var, value) for var, value in match.after]

    def _arg(self, arg: KernelArg) -> relax.Expr:
        made_for_it = isinstance(arg.expr, relax.Call) and isinstance(arg.expr.ty, relax.TensorType)
        if made_for_it:
            arg = replace(arg, expr=self._bind(arg.expr, "made"))
        if arg.shape is None or same_shape(shape_of(arg.expr), arg.shape):
            return arg.expr
        source = self._flattened(arg)
        if source is not None:
            return source
        flat = self._bind(relax.op.reshape(arg.expr, arg.shape), "flat")
        if isinstance(arg.expr, relax.Var):
            self.flat[arg.expr] = flat
        return flat

    def _flattened(self, arg: KernelArg) -> relax.Expr | None:
        """Return a tensor of the wanted shape of which `arg` is only a reshape."""
        flat = self.flat.get(arg.expr) if isinstance(arg.expr, relax.Var) else None
        if flat is None:
            reshape = self.view.call(arg.expr, "relax.reshape")
            flat = reshape.args[0] if reshape is not None else None
        return flat if flat is not None and same_shape(shape_of(flat), arg.shape) else None

    def _result(self, value: relax.Expr, out: KernelOut) -> None:
        if same_shape(shape_of(out.var), out.shape):
            self.bindings.append(relax.VarBinding(out.var, value))
            return
        flat = self._bind(value, f"{out.var.name}_flat")
        self.flat[out.var] = flat
        reshape = relax.op.reshape(flat, shape_of(out.var))
        self.bindings.append(relax.VarBinding(out.var, self.builder.normalize(reshape)))

    def _bind(self, value: relax.Expr, hint: str) -> relax.Var:
        value = self.builder.normalize(value)
        var = relax.DataflowVar(hint, value.ty)
        self.bindings.append(relax.VarBinding(var, value))
        return var
