"""Rebuilding a block around kernels: their order, and the reshapes that they need."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tvm import ir, relax

from .bindings import Identity
from .effects import free_vars
from .pattern import BlockView, KernelArg, KernelOut, Match
from .shapes import same_shape, shape_of


@dataclass
class Kernel:
    """An accepted match and the PrimFunc that computes it."""

    match: Match
    gvar: ir.GlobalVar


def order(view: BlockView, matches: list[Match]) -> list[Match | int] | None:
    """Order kernels and the remaining bindings so that each comes after what it reads.

    The original order is kept where it can be.  A binding that writes memory stays behind all that
    touched it before, and in front of all that touches it later.  None if that leaves no order.
    """
    owner = list(range(len(view.bindings)))  # of each binding: itself, or the number of its kernel
    position: dict[int, int] = {}
    for number, match in enumerate(matches):
        places = [view.index[v] for v in match.covers]
        position[-1 - number] = min(places)
        for i in places:
            owner[i] = -1 - number
    items = sorted(set(owner))
    needs: dict[int, set[int]] = {item: set() for item in items}
    at = {hash(v): i for v, i in view.index.items()}
    for me, var in zip(owner, view.index, strict=True):
        before = (at.get(hash(v)) for v in view.needs(var))
        needs[me].update(owner[j] for j in before if j is not None)
    makers = [{me} for me in owner]
    for number, match in enumerate(matches):
        for var in computed(view, match):
            makers[view.index[var]].add(-1 - number)
    for writer, other in _clashes(view):
        me = owner[writer]
        for item in makers[other]:
            first, then = (item, me) if other < writer else (me, item)
            needs[then].add(first)
    for item, others in needs.items():
        others.discard(item)
    return _topological(items, needs, position, matches)


def _clashes(view: BlockView) -> Iterator[tuple[int, int]]:
    """Yield places of bindings that write, each with that of every other that touches the same."""
    effects = [view.memory.effects[v] for v in view.index]
    for writer, (_, written) in enumerate(effects):
        for other, (touched, _) in enumerate(effects if written else ()):
            if other != writer and not touched.isdisjoint(written):
                yield writer, other


def computed(view: BlockView, match: Match) -> set[relax.Var]:
    """Return the bindings whose work a kernel does: those it covers, and those it looks through.

    It reads a weight, say, in place of the weight's transpose, which others go on to read.
    """
    inputs = {v for arg in match.args for v in free_vars(arg.expr)}
    found = set(match.covers)
    for var in inputs:
        found.update(_moved_from(view, var, inputs))
    stack = list(found)
    while stack:
        for read in view.reads[stack.pop()]:
            if read in view.index and read not in found | inputs:
                found.add(read)
                stack.append(read)
    return found


def _moved_from(view: BlockView, var: relax.Var, inputs: set[relax.Var]) -> list[relax.Var]:
    """Return the bindings that make an input of another one, if each reads one variable only."""
    path: list[relax.Var] = []
    while var in view.index and len(view.reads[var]) == 1:
        path.append(var)
        var = view.reads[var][0]
        if var in inputs:
            return path
    return []


def overwritten(view: BlockView, match: Match) -> str | None:
    """Say what a kernel would read too late, as it is written before its last operand is there."""
    inside = computed(view, match)
    end = max(view.index[v] for v in match.covers)
    for first, then in ((other, writer) for writer, other in _clashes(view)):
        other, writer = view.bindings[first].var, view.bindings[then].var
        if first < then < end and other in inside:
            places = view.memory.effects[writer].written
            names = [v for v in (*view.reads[other], other) if view.memory.of(v) & places]
            name = names[0].name if names else other.name
            return f"{writer.name} writes the memory of {name}, which the chain reads before"
    return None


def _topological(
    items: list[int], needs: dict[int, set[int]], position: dict[int, int], matches: list[Match]
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


def rebuild(view: BlockView, kernels: list[Kernel]) -> relax.DataflowBlock:
    """Emit the block with kernels in place of the bindings that they cover.

    What they look through goes too, where nothing else reads it.
    """
    emitter = _Emitter(view, {v for kernel in kernels for v in hidden(kernel.match)})
    by_match = {id(k.match): k for k in kernels}
    in_order = order(view, [k.match for k in kernels])
    assert in_order is not None, "matches were checked to be orderable"
    for item in in_order:
        if isinstance(item, int):
            emitter.bindings.append(view.bindings[item])
        else:
            emitter.kernel(by_match[id(item)])
    return relax.DataflowBlock(_without_unread(view, emitter.bindings))


def hidden(match: Match) -> set[relax.Var]:
    """Return the bindings that are not there any more beside a kernel."""
    return set(match.covers) - {*(out.var for out in match.outs), *dict(match.after)}


def _without_unread(view: BlockView, bindings: list[relax.Binding]) -> list[relax.Binding]:
    """Drop what kernels have looked through, if nothing reads it any more."""
    kept: list[relax.Binding] = []
    read: set[Identity] = set()
    for binding in reversed(bindings):
        var = binding.var
        was_read = var not in view.casts and bool(view.uses(var)) and not view.escapes(var)
        if was_read and hash(var) not in read and not view.memory.effects[var].written:
            continue
        same = binding.value.same_as(view.defs.get(var))
        read.update(map(hash, view.needs(var) if same else free_vars(binding.value)))
        kept.append(binding)
    return kept[::-1]


class _Emitter:
    """Writes the bindings around a kernel: reshapes to its shapes, the call, and back."""

    def __init__(self, view: BlockView, gone: set[relax.Var]):
        self.view, self.gone = view, gone
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
            arg = replace(arg, expr=self._made(arg.expr))
        if arg.shape is None or same_shape(shape_of(arg.expr), arg.shape):
            return arg.expr
        source = self._flattened(arg)
        if source is not None:
            return source
        flat = self._bind(relax.op.reshape(arg.expr, arg.shape), "flat")
        if isinstance(arg.expr, relax.Var):
            self.flat[arg.expr] = flat
        return flat

    def _made(self, call: relax.Call) -> relax.Var:
        """Bind a call, and calls that are its operands."""
        args = [self._made(a) if isinstance(a, relax.Call) else a for a in call.args]
        return self._bind(relax.Call(call.op, args, call.attrs), "made")

    def _flattened(self, arg: KernelArg) -> relax.Expr | None:
        """Return a tensor of the wanted shape of which `arg` is only a reshape."""
        if not self.view.memory.is_constant(arg.expr):
            return None
        flat = self.flat.get(arg.expr) if isinstance(arg.expr, relax.Var) else None
        if flat is None:
            reshape = self.view.call(arg.expr, "relax.reshape")
            flat = reshape.args[0] if reshape is not None else None
        if flat is None or flat in self.gone:
            return None
        return flat if same_shape(shape_of(flat), arg.shape) else None

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
