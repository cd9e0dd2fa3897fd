"""Formulas of tensors whose elements are only moved, and kernels that read what they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm import ir, te, tirx

from ..matching.expressions import (
    found_in,
    int64,
    is_if_then_else,
    loads_of,
    substitute,
    variables_of,
)
from ..matching.stages import Stage, is_view, read_stages
from ..tvm_ir import Analyzer, SBlock, SBlockRealize, TensorLoad, TensorRegion, structural_map

MOVED_ATTR = "relax_fusion.moved"
"""PrimFunc attribute: its one block moves elements of its first parameter, and is no view."""

MOST_LOADS = 8
"""In the formula of an element."""

MOST_READS = 2.0
"""How often a kernel may read an element whose place has to be computed for each: to move it is one
computing of its place, a read and a write more."""


def composed(func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """Return a movement as one block, None for what is none or a view."""
    if len(func.params) != 2 or not all(map(_is_static, func.params)):
        return None
    stages = None if is_view(func) else read_stages(func)
    if not stages or any(s.reduced or s.buffer == func.params[0] for s in stages):
        return None  # a sum, or a function that is called in place and writes its source as well
    if stages[-1].buffer != func.params[1]:
        return None
    made: dict[tirx.Var, Stage] = {}

    def inlined(load: TensorLoad) -> tirx.Expr:
        stage = made.get(load.source)
        if stage is None:
            return load
        return substitute(stage.value, dict(zip(stage.spatial, load.indices, strict=True)))

    for stage in stages:
        value = structural_map(stage.value, (TensorLoad, inlined), order="post")
        if len(loads_of(value)) > MOST_LOADS:
            return None
        made[stage.buffer] = replace(stage, value=value)
    sources = {load.source for load in loads_of(value)}
    if sources != {func.params[0]} or _moved(value, lambda load: load) is None:
        return None
    x = te.placeholder(func.params[0].ty.shape, str(func.params[0].ty.dtype), "x")

    def element(*at: tirx.Expr) -> tirx.Expr:
        own = inlined(tirx.BufferLoad(func.params[1], at))
        return structural_map(own, (TensorLoad, lambda load: x(*load.indices)), order="post")

    moved = te.compute(func.params[1].ty.shape, element, "moved")
    composition = te.create_prim_func([x, moved]).without_attr("global_symbol")
    return composition.with_attrs({**dict(func.attrs or {}), MOVED_ATTR: True})


def _is_static(param: tirx.Var) -> bool:
    return tirx.is_buffer_var(param) and all(isinstance(d, tirx.IntImm) for d in param.ty.shape)


def _moved(
    value: tirx.Expr, read: Callable[[TensorLoad], tirx.Expr | None], lanes: int = 1
) -> tirx.Expr | None:
    """Return a value that is chosen among loads and numbers, with its loads replaced; else None."""
    if isinstance(value, TensorLoad):
        return read(value)
    if isinstance(value, tirx.IntImm | tirx.FloatImm):
        return value if lanes == 1 else tirx.Broadcast(value, lanes)
    if not is_if_then_else(value) or loads_of(value.args[0]):
        return None
    sides = [_moved(side, read, lanes) for side in value.args[1:]]
    return None if None in sides else tirx.if_then_else(value.args[0], *sides)


@dataclass(frozen=True)
class Formula:
    """What each element of a tensor is, in terms of where it lies: of `source`, or a number."""

    at: tuple[tirx.Var, ...]
    shape: tuple[int, ...]
    value: tirx.Expr
    source: tirx.Var

    @classmethod
    def of(cls, func: tirx.PrimFunc) -> Formula | None:
        """Return that of a PrimFunc of one block that moves elements, scheduled or not."""
        blocks = [b for b in found_in(func.body, SBlock) if isinstance(b.body, tirx.BufferStore)]
        if len(blocks) != 1 or len(func.params) != 2 or not all(map(_is_static, func.params)):
            return None
        store, (source, made) = blocks[0].body, func.params
        own = {axis.var for axis in blocks[0].iter_vars}
        at = tuple(store.indices)
        if not store.buffer.same_as(made) or len(set(at)) != len(at) or not own.issuperset(at):
            return None
        if any(load.source != source for load in loads_of(store.value)):
            return None
        if _moved(store.value, lambda load: load) is None:
            return None
        return cls(at, tuple(map(int, made.ty.shape)), store.value, source)

    @property
    def loads(self) -> int:
        """How many loads an element is chosen of."""
        return len(loads_of(self.value))

    def behind(self, first: Formula) -> Formula:
        """Return what this one makes of what `first` has made."""

        def read(load: TensorLoad) -> tirx.Expr:
            return substitute(first.value, dict(zip(first.at, load.indices, strict=True)))

        value = structural_map(self.value, (TensorLoad, read), order="post")
        return Formula(self.at, self.shape, value, first.source)

    def simple(self) -> Formula:
        """Return the same with indices and conditions made simple, as places are in the shape.

        Along an axis of size 1 none is left: schedules have loops of int32 over these.
        """
        ana = self._bounds()

        def read(load: TensorLoad) -> tirx.Expr:
            return tirx.BufferLoad(load.source, [ana.simplify(i) for i in load.indices])

        def chosen(call: ir.Call) -> tirx.Expr:
            if not is_if_then_else(call):
                return call
            return tirx.if_then_else(ana.simplify(call.args[0]), *call.args[1:])

        value = structural_map(self.value, [(TensorLoad, read), (ir.Call, chosen)], order="post")
        return Formula(self.at, self.shape, value, self.source)

    @property
    def moves_rows(self) -> bool:
        """Whether each row is one of the source, or numbers."""
        loads, rows = loads_of(self.value), set(self.at[:-1])
        others = substitute(self.value, dict.fromkeys(self.at[-1:], int64(0)))
        return all(load.indices[-1].same_as(self.at[-1]) for load in loads) and not any(
            variables_of(i) - rows for load in loads_of(others) for i in load.indices[:-1]
        )

    def read(self, indices: Sequence[tirx.Expr]) -> tirx.Expr:
        """Return the element at a place, or the vector along the last axis."""
        *rows, last = indices
        if not isinstance(last, tirx.Ramp):
            return substitute(self.value, dict(zip(self.at, indices, strict=True)))
        lanes, stride = int(last.lanes), last.stride
        found = self._run(lanes) if isinstance(stride, tirx.IntImm) and int(stride) == 1 else None
        ana = Analyzer()
        if found is not None and ana.can_prove_equal(tirx.floormod(last.base, lanes), 0):
            run, step = found
            at = dict(zip(self.at, rows, strict=False))
            return substitute(run, {**at, step: ana.simplify(tirx.floordiv(last.base, lanes))})
        each = [self.read([*rows, last.base + stride * n]) for n in range(lanes)]
        return tirx.Shuffle(each, [tirx.IntImm("int32", n) for n in range(lanes)])

    def _run(self, lanes: int) -> tuple[tirx.Expr, tirx.Var] | None:
        """Return `lanes` elements of a row as a vector in terms of the number of the vector.

        None where they do not lie one behind the other.
        """
        ana, step, lane = self._bounds(), tirx.Var("step", "int64"), tirx.Var("lane", "int64")
        ana.bind(step, ir.Range(int64(0), int64(max(self.shape[-1] // lanes, 1))))
        ana.bind(lane, ir.Range(int64(0), int64(lanes)))

        def read(load: TensorLoad) -> tirx.Expr:
            *rows, last = (ana.simplify(i) for i in load.indices)
            first = ana.simplify(last - lane)
            return tirx.BufferLoad(load.source, [*rows, tirx.Ramp(first, int64(1), lanes)])

        value = substitute(self.value, {self.at[-1]: step * lanes + lane})
        conditions = {
            c.args[0]: ana.simplify(c.args[0]) for c in found_in(value, ir.Call) if c.args
        }
        value = structural_map(value, (ir.Expr, lambda e: conditions.get(e, e)))
        made = _moved(value, read, lanes)
        return None if made is None or lane in variables_of(made) else (made, step)

    def _bounds(self) -> Analyzer:
        ana = Analyzer()
        for var, size in zip(self.at, self.shape, strict=True):
            ana.bind(var, ir.Range(int64(0), int64(size)))
        return ana


def with_moved(func: tirx.PrimFunc, index: int, formula: Formula) -> tirx.PrimFunc | None:
    """Return a kernel that reads an operand where the tensor lies that it is moved from.

    None where the operand is read in another way than by loads, or so often that computing places
    may take longer than moving did.

    `func`: it stores nothing in that operand.
    `index`: the number of the operand.
    `formula`: of the operand's elements.
    """
    old, source = func.params[index], formula.source
    times = _reads(func.body, old)
    if old.ty.strides or times is None:
        return None
    if times > MOST_READS * prod(formula.shape) and not formula.moves_rows:
        return None
    new = tirx.decl_buffer(list(source.ty.shape), str(source.ty.dtype), old.name)
    whole = [ir.Range.from_min_extent(int64(0), size) for size in source.ty.shape]

    def there(load: TensorLoad) -> tirx.Expr:
        return tirx.BufferLoad(new, load.indices) if load.source.same_as(source) else load

    def read(load: TensorLoad) -> tirx.Expr:
        if not load.source.same_as(old):
            return load
        return structural_map(formula.read(load.indices), (TensorLoad, there), order="post")

    def region(made: TensorRegion) -> TensorRegion:
        return tirx.BufferRegion(new, whole) if made.source.same_as(old) else made

    if any(b.match_buffers for b in found_in(func.body, SBlock)):
        return None
    body = structural_map(func.body, (TensorLoad, read), order="post")
    body = structural_map(body, (TensorRegion, region), order="post")
    if variables_of(body) & {old}:
        return None
    params = [new if n == index else param for n, param in enumerate(func.params)]
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs).without_attr("global_symbol")


def _reads(body: tirx.Stmt, tensor: tirx.Var) -> float | None:
    """Return how many elements of a tensor a body reads, None where loops do not tell."""
    times = {hash(x): _lanes(x) for x in loads_of(body) if x.source.same_as(tensor)}
    values: dict[tirx.Var, tirx.Expr] = {}
    for made in found_in(body, SBlockRealize):
        values |= {a.var: at for a, at in zip(made.block.iter_vars, made.iter_values, strict=True)}
    for loop in found_in(body, tirx.For):
        is_vector = loop.kind == tirx.ForKind.VECTORIZED
        for load in loads_of(loop.body):
            if hash(load) not in times:
                continue
            if is_vector and loop.loop_var not in _read_of(load.indices, values):
                continue  # one element for all lanes
            if not isinstance(loop.extent, tirx.IntImm):
                return None
            times[hash(load)] *= int(loop.extent)
    return sum(times.values()) if times else None


def _read_of(indices: object, values: Mapping[tirx.Var, tirx.Expr]) -> set[tirx.Var]:
    """Return the variables that indices are computed of, those of blocks looked through."""
    found = variables_of(indices)
    behind = [_read_of(values[var], values) for var in found if var in values]
    return found.union(*behind)


def _lanes(load: TensorLoad) -> float:
    last = load.indices[-1]
    return float(int(last.lanes)) if isinstance(last, tirx.Ramp) else 1.0
