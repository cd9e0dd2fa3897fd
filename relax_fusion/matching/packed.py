"""Weights that are decoded from words: which operands a kernel reads instead of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tvm import relax, tirx

from ..tvm_ir import GenericConst, structural_equal, structural_hash
from ..workload import Dim, Operand, Packed
from .dequantized import Group, dequantized, group_of
from .packed_format import Decoding, packed_format
from .pattern import BlockView, KernelArg, PrimExpr
from .shapes import as_dim, dtype_of, is_one, same_shape, shape_of


@dataclass(frozen=True)
class PackedWeight:
    """A weight and what it is stored as."""

    form: Packed  # its format
    operands: tuple[KernelArg, ...]  # words, and scales and zeros if there are such
    steps: tuple[relax.Var, ...]  # the bindings that decode it, in order
    transposed: bool  # whether the format is that of the transposed weight

    def args(self, name: str) -> dict[str, KernelArg]:
        """Return the arguments of a kernel that reads it under a name."""
        suffixes = ["", *(["_scale"] if self.form.scale_dtype else []), "_zero"]
        return {f"{name}{s}": o for s, o in zip(suffixes, self.operands, strict=False)}

    def covers(self, view: BlockView) -> tuple[relax.Var, ...]:
        """Return the steps that nothing else reads than one reader of the weight."""
        weight = self.steps[-1]
        kept = [weight] if view.only_user(weight) is not None else []
        for step in reversed(self.steps[:-1]):
            if kept and not view.escapes(step) and set(view.uses(step)) <= set(kept):
                kept.append(step)
        return tuple(reversed(kept))


def packed_weight(view: BlockView, weight: relax.Expr) -> PackedWeight | None:
    """Return in which format a decoded weight is stored; None if it is not, or in none of ours."""
    if not isinstance(weight, relax.Var):
        return None
    found = _decoding(view, weight)
    if found is None:
        return None
    decoding, args, steps = found
    operands = _operands(weight, decoding, [args[n] for n in decoding.order])
    if operands is None:
        return None
    return PackedWeight(decoding.form, operands, steps, decoding.transposed)


def _decoding(
    view: BlockView, weight: relax.Var
) -> tuple[Decoding, Sequence[relax.Expr], tuple[relax.Var, ...]] | None:
    """Return what decodes a weight: a PrimFunc by itself, or several bindings."""
    call = view.call(weight, "relax.call_tir")
    func = view.mod[call.args[0]] if call is not None else None
    if call is not None and isinstance(func, tirx.PrimFunc) and len(call.args) == 2:
        args = call.args[1].fields if isinstance(call.args[1], relax.Tuple) else [call.args[1]]
        one = packed_format(func)
        if one is not None and len(args) == len(func.params) - 1:
            return one, args, (weight,)
    found = dequantized(view, weight)
    if found is None or (call is not None and len(found.steps) == 1):
        return None
    group = group_of(view, weight, found.steps[:-1], numbers=True)
    if group is None or group.sizes:
        return None
    func = _lowered(_Structure(group))
    several = None if func is None else packed_format(func, _constants(group.args))
    return None if several is None else (several, group.args, found.steps)


@dataclass(frozen=True, eq=False)
class _Structure:
    """A group, equal to those that compute the same."""

    group: Group

    def __hash__(self) -> int:
        return int(structural_hash(self.group.func))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Structure):
            return False
        mine, theirs = self.group, other.group
        same = list(mine.called.values()) == list(theirs.called.values())
        return same and bool(structural_equal(mine.func, theirs.func))


@lru_cache(maxsize=256)
def _lowered(structure: _Structure) -> tirx.PrimFunc | None:
    return structure.group.lowered()


def _constants(args: Sequence[relax.Expr]) -> tuple[tuple[int, int], ...]:
    """Return the arguments that are full of one integer, by their numbers."""
    found = []
    for n, arg in enumerate(args):
        if isinstance(arg, GenericConst) and "int" in dtype_of(arg):
            values = arg.value.numpy().reshape(-1)
            if len(values) and (values == values[0]).all():
                found.append((n, int(values[0])))
    return tuple(found)


def _operands(
    weight: relax.Var, decoding: Decoding, given: Sequence[relax.Expr]
) -> tuple[KernelArg, ...] | None:
    """Return the operands as a kernel takes them; None where their shapes are others."""
    whole, form = shape_of(weight), decoding.form
    if whole is None or len(whole) != 2:
        return None
    shape = whole[::-1] if decoding.transposed else whole
    dims = tuple(as_dim(d) for d in shape)
    needed = {form.word_axis} if form.fields > 1 else set()
    needed |= {a for a, size in ((form.axis, form.group), (form.other, form.lines)) if size > 1}
    needed |= {form.other} if form.zero is None and form.fields > 1 else set()
    if not all(isinstance(dims[a], int) for a in needed):
        return None
    sizes: dict[Dim, PrimExpr | int] = dict(zip(dims, shape, strict=True))
    found = []
    for expr, operand in zip(given, form.operands("w", dims), strict=True):
        wanted = [sizes.get(d, d) for d in operand.shape or ()]
        if not _fits(expr, operand, wanted):
            return None
        found.append(KernelArg(expr, None if len(shape_of(expr) or ()) == 2 else tuple(wanted)))
    return tuple(found)


def _fits(expr: relax.Expr, operand: Operand, wanted: Sequence[PrimExpr | int]) -> bool:
    """Tell whether a tensor has a dtype and a shape, but for dimensions of 1."""
    shape = shape_of(expr)
    several = None if shape is None else [d for d in shape if not is_one(d)]
    same = same_shape(several, [d for d in wanted if not is_one(d)])
    return same and dtype_of(expr) == operand.dtype
