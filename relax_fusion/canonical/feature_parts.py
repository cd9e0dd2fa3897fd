"""Parts of a projection's features as results of their own, where a copy would be made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import ir, relax, tirx

from ..matching.bindings import Identity, items_of
from ..matching.effects import Memory, reads_of
from ..matching.pattern import is_call
from ..matching.shapes import dtype_of, permutation, same_shape, shape_of
from ..transforms.modules import module_pass
from ..tvm_ir import GenericConst
from ..workload import FLOAT_BYTES
from .rewriter import with_blocks

MOST_PARTS = 8
"""A projection is cut into no more parts."""

ALIGNED = 16
"""Bytes: a part of a weight begins at a multiple, as the widest loads of kernels need."""

_READERS = ("relax.matmul", "relax.nn.rms_norm", "relax.nn.layer_norm")
"""What reads its first operand in a kernel that takes no slice of it."""

_VIEWS = ("relax.reshape", "relax.expand_dims")
_STEPS = ("relax.add", "relax.multiply")
"""What a kernel takes along with a row for all rows of a sequence, as adaLN's shifts and gates."""


@module_pass
class SplitProjections:
    """Multiply by parts of a weight, where kernels read parts of the features apart.

    rewrite::

        c, r = R.split(R.matmul(x, R.permute_dims(w)), [64], axis=-1)    # w as [96, k]
        y = R.nn.rms_norm(c, g)
            ->
        c = R.matmul(x, R.permute_dims(w[:64]))
        r = R.matmul(x, R.permute_dims(w[64:]))
        y = R.nn.rms_norm(c, g)

    A pass puts both matmuls into one kernel, which writes each result where the next reads it.
    Rows of a weight lie one behind the other, so kernels read them where they are (`ReadParts`).
    A bias is cut alike.  Such parts are also those that are added to all rows of a sequence, or
    multiply them: the shifts, scales and gates of adaLN.

    declines when:
        anything else reads the features; the weight is computed, written to, or lies as [k, n]; a
        part begins at no multiple of 16 bytes, or is as long as no number says; there are more
        than eight.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        return with_blocks(mod, _cut)


@dataclass(frozen=True)
class _Features:
    """A projection, with its bias or without, and the split of what it makes."""

    x: relax.Expr
    weight: relax.Expr
    bias: relax.Expr | None
    out_dtype: str
    covers: frozenset[Identity]
    parts: tuple[tuple[relax.Var, int, int], ...]


def _cut(
    block: relax.DataflowBlock, memory: Memory, builder: relax.BlockBuilder
) -> list[relax.Binding] | None:
    """Return the bindings of a block with its projections cut, None if there is none to cut."""
    bindings = items_of(block.bindings)
    view, found = _Block(bindings, memory), dict[Identity, _Features]()
    for binding in bindings:
        features = view.features(binding)
        if features is not None:
            found[hash(binding.var)] = features
    if not found:
        return None
    gone = frozenset[Identity]().union(*(f.covers for f in found.values()))
    made: list[relax.Binding] = []
    for binding in bindings:
        if hash(binding.var) in found:
            made += _parts(found[hash(binding.var)], builder)
        elif hash(binding.var) not in gone:
            made.append(binding)
    return made


def _parts(found: _Features, builder: relax.BlockBuilder) -> Iterator[relax.Binding]:
    """Yield the bindings that make each part apart."""

    def bound(value: relax.Expr, name: str = "part") -> Iterator[relax.Binding]:
        value = builder.normalize(value)
        yield relax.VarBinding(relax.DataflowVar(name, value.ty), value)

    for var, first, last in found.parts:

        def rows(of: relax.Expr, first: int = first, last: int = last) -> relax.Expr:
            return relax.op.strided_slice(of, [0], [first], [last], assume_inbound=True)

        (weight,) = bound(rows(found.weight))
        (turned,) = bound(relax.op.permute_dims(weight.var))
        value = relax.op.matmul(found.x, turned.var, found.out_dtype or None)
        yield from (weight, turned)
        if found.bias is not None:
            (product,), (bias,) = bound(value), bound(rows(found.bias))
            yield from (product, bias)
            value = relax.op.add(product.var, bias.var)
        yield relax.VarBinding(var, builder.normalize(value))


class _Block:
    """A dataflow block, and who reads what in it."""

    def __init__(self, bindings: Sequence[relax.Binding], memory: Memory):
        self.memory = memory
        self.defs = {hash(b.var): b for b in bindings}
        self.readers: dict[Identity, list[relax.Binding]] = {}
        for binding in bindings:
            for var in {hash(v): v for v in reads_of(binding.value)}:
                self.readers.setdefault(var, []).append(binding)

    def features(self, split: relax.Binding) -> _Features | None:
        """Read a split of the features of a projection, None if it is to stay."""
        call = split.value
        shape = shape_of(call.args[0]) if is_call(call, "relax.split") else None
        if not shape or int(call.attrs.axis) % len(shape) != len(shape) - 1:
            return None
        parts, covers = self._items(split, shape[-1]), {hash(split.var)}
        added = self._inner(call.args[0])
        made, bias = added, None
        if is_call(added, "relax.add"):
            covers.add(hash(call.args[0]))
            sides = list(added.args)
            sides = sides if len(shape_of(sides[1]) or ()) == 1 else sides[::-1]
            made, bias = self._inner(sides[0]), sides[1]
            covers.add(hash(sides[0]))
        covers.add(hash(call.args[0]))
        if not is_call(made, "relax.matmul") or not parts or len(shape) < 2:
            return None
        turned = self.defs.get(hash(made.args[1]))
        if turned is None or not is_call(turned.value, "relax.permute_dims"):
            return None
        weight = turned.value.args[0]
        if len(shape_of(weight) or ()) != 2 or permutation(turned.value, 2) != [1, 0]:
            return None
        if not (self._is_whole(weight, 2) and (bias is None or self._is_whole(bias, 1))):
            return None
        if not any(self._copies(var) for var, *_ in parts) or not _fit(parts, weight, bias):
            return None
        covers |= {hash(var) for var, *_ in parts}
        return _Features(
            made.args[0], weight, bias, str(made.attrs.out_dtype or ""), frozenset(covers), parts
        )

    def _items(
        self, split: relax.Binding, size: tirx.Expr
    ) -> tuple[tuple[relax.Var, int, int], ...]:
        """Return the items of a split, and where each begins and ends; none if all is not known."""
        readers, sections = self.readers.get(hash(split.var), []), split.value.attrs
        given = sections.indices_or_sections
        if not isinstance(size, tirx.IntImm) or len(readers) > MOST_PARTS or not int(size):
            return ()
        if hasattr(given, "__len__"):
            ends = [0, *map(int, given), int(size)]
        else:
            ends = [*range(0, int(size), -(-int(size) // int(given))), int(size)]
        items = [b for b in readers if isinstance(b.value, relax.TupleGetItem)]
        if len(items) != len(readers) or not isinstance(split.var, relax.DataflowVar):
            return ()
        places = [(b.var, int(b.value.index)) for b in items]
        if any(i + 1 >= len(ends) for _, i in places):  # more parts than features: some are empty
            return ()
        return tuple((var, ends[i], ends[i + 1]) for var, i in places)

    def _inner(self, expr: relax.Expr) -> relax.Expr | None:
        """Return the value of a variable that one binding of the block reads, and nothing else."""
        binding = self.defs.get(hash(expr))
        if binding is None or not isinstance(binding.var, relax.DataflowVar):
            return None
        plain = isinstance(binding, relax.VarBinding) and self.memory.is_constant(binding.var)
        return binding.value if plain and len(self.readers.get(hash(expr), ())) == 1 else None

    def _is_whole(self, expr: relax.Expr, rank: int) -> bool:
        """Tell whether a tensor lies in memory as it is, and is never written."""
        made = self.defs.get(hash(expr))
        given = made is None or isinstance(made.value, relax.TupleGetItem)
        known = isinstance(expr, relax.Var | GenericConst) and len(shape_of(expr) or ()) == rank
        return given and known and self.memory.is_constant(expr)

    def _copies(self, var: relax.Var) -> bool:
        """Tell whether a part is read where it would have to be copied."""
        for binding in self.readers.get(hash(var), ()):
            if is_call(binding.value, *_READERS) and binding.value.args[0].same_as(var):
                return True
            if is_call(binding.value, *_VIEWS) and self._copies(binding.var):
                return True
            if is_call(binding.value, *_STEPS) and not same_shape(
                *map(shape_of, (var, binding.var))
            ):
                return True
        return False


def _fit(
    parts: Sequence[tuple[relax.Var, int, int]], weight: relax.Expr, bias: relax.Expr | None
) -> bool:
    """Tell whether parts of a weight and a bias begin at aligned addresses."""
    width = (shape_of(weight) or [])[1]
    size = FLOAT_BYTES.get(dtype_of(weight), 0)
    if not isinstance(width, tirx.IntImm) or not size:
        return False
    step = size if bias is not None else size * int(width)
    return all(first < last and first * step % ALIGNED == 0 for _, first, last in parts) and (
        all(first * size * int(width) % ALIGNED == 0 for _, first, _ in parts)
    )
