"""What a PrimFunc launches: branches, scheduled TIR for the other sizes, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

from tvm import ir, relax, s_tir, tirx

from ..errors import KernelError
from ..estimator.tile_plan import PLAN_ATTR
from ..tvm_ir import Analyzer, structural_map
from ..workload.json import WORKLOAD_ATTR
from .arguments import InOut, Out, Part, TensorMap, Workspace, is_tensor
from .kernel import CompiledKernel


@dataclass(frozen=True)
class Buffer:
    """A tensor parameter of the PrimFunc, its sizes in the variables of the caller."""

    name: str
    shape: tuple[Any, ...]
    dtype: str


class Memory:
    """The tensors that a call reads, writes and works in, each a parameter of the PrimFunc.

    `shared` is memory that several workspaces share; the others have their own.
    """

    def __init__(
        self,
        outputs: Sequence[relax.TensorType],
        shared: Sequence[tuple[Workspace, Sequence[Workspace]]] = (),
    ):
        self.outputs, self.shared = outputs, shared
        self.inputs: list[relax.Expr] = []
        self.workspaces: list[Workspace] = []
        self.in_place: dict[int, int] = {}

    def add(self, value: Any) -> None:
        """Take note of an argument if it is memory."""
        if isinstance(value, TensorMap | Part):
            self.add(value.of)
        elif isinstance(value, InOut):
            self.add(value.tensor)
            self.in_place[value.index] = self._input(value.tensor)
        elif isinstance(value, Workspace):
            memory = self._memory_of(value)
            if not any(w is memory for w in self.workspaces):
                self.workspaces.append(memory)
        elif is_tensor(value) and self._input(value) < 0:
            if not isinstance(value.ty.shape, relax.ShapeExpr):
                raise KernelError(f"{value} has no known shape: R.match_cast gives it one")
            self.inputs.append(value)

    def _input(self, tensor: relax.Expr) -> int:
        return next((i for i, t in enumerate(self.inputs) if t.same_as(tensor)), -1)

    def _memory_of(self, value: Workspace) -> Workspace:
        return next((r for r, inside in self.shared if any(w is value for w in inside)), value)

    def layout_of(self, value: TensorMap) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the sizes and strides of a tensor map."""
        of = value.of.of if isinstance(value.of, Part) else value.of
        if isinstance(of, Workspace):
            return value.layout(of.shape)
        buffer = self.buffer_of(of)
        assert buffer is not None, of
        return value.layout(buffer.shape)

    def buffer_of(self, value: Any) -> Buffer | None:
        """Return the parameter that an argument points to; None for a number."""
        if isinstance(value, TensorMap | Part):
            return self.buffer_of(value.of)
        if isinstance(value, InOut):
            return self.buffer_of(value.tensor)
        if isinstance(value, Out):
            if value.index in self.in_place:
                return self.read()[self.in_place[value.index]]
            ty = self.outputs[value.index]
            return Buffer(f"out{value.index}", tuple(ty.shape.values), str(ty.dtype))
        if isinstance(value, Workspace):
            memory = self._memory_of(value)
            index = next(i for i, w in enumerate(self.workspaces) if w is memory)
            return Buffer(f"workspace{index}", tuple(memory.shape), memory.dtype)
        return self.read()[self._input(value)] if is_tensor(value) else None

    def read(self) -> list[Buffer]:
        """Return the parameters in front of the numbers."""
        return [
            Buffer(f"in{i}", tuple(t.ty.shape.values), str(t.ty.dtype))
            for i, t in enumerate(self.inputs)
        ]

    def written(self) -> list[Buffer]:
        """Return the parameters behind the numbers: outputs not in place, then workspaces."""
        fresh = [Out(i) for i in range(len(self.outputs)) if i not in self.in_place]
        return [b for v in (*fresh, *self.workspaces) if (b := self.buffer_of(v)) is not None]


def shared_workspaces(branches: Sequence[Branch]) -> list[tuple[Workspace, list[Workspace]]]:
    """Return memory for the workspaces of some branches, and which workspaces are in it.

    A call runs one branch, so workspaces of the same elements that are in no branch together are
    the same memory, as much as the largest needs.
    """
    used = [
        _distinct([m for x in b.launches for v in x.args if isinstance(m := _memory(v), Workspace)])
        for b in branches
    ]
    groups: list[list[Workspace]] = []
    for space in _distinct([w for found in used for w in found]):
        together = [w for found in used if _has(found, space) for w in found]
        fitting = (
            group
            for group in groups
            if group[0].dtype == space.dtype and not any(_has(together, w) for w in group)
        )
        group = next(fitting, None)
        if group is None:
            groups.append([space])
        else:
            group.append(space)
    return [(_largest(group), group) for group in groups]


def _memory(value: Any) -> Any:
    """Return what an argument is a part or a map of."""
    return _memory(value.of) if isinstance(value, TensorMap | Part) else value


def _has(found: Sequence[Workspace], space: Workspace) -> bool:
    """Tell whether a workspace is among some; equal ones are not the same."""
    return any(w is space for w in found)


def _distinct(found: Sequence[Workspace]) -> list[Workspace]:
    return list({id(w): w for w in found}.values())


def _largest(group: Sequence[Workspace]) -> Workspace:
    """Return a workspace that holds each of some, of the same shape if they have one."""
    if len(group) == 1:
        return group[0]
    counts = [prod(space.shape, start=tirx.IntImm("int64", 1)) for space in group]
    return Workspace((largest(counts),), group[0].dtype)


def largest(sizes: Sequence[ir.Expr]) -> ir.Expr:
    """Return the largest of some sizes."""
    return Analyzer().simplify(reduce(tirx.max, sizes))


@dataclass(frozen=True)
class Launch:
    """One launch: a kernel, one to three numbers of programs, and its run-time arguments."""

    kernel: CompiledKernel
    grid: Sequence[Any]
    args: Sequence[Any]


@dataclass(frozen=True)
class Branch:
    """Launches that run one after the other where `when` holds (the last branch: in any case)."""

    when: Any
    launches: Sequence[Launch]


def every_launch(branches: Sequence[Branch]) -> list[Launch]:
    """Return the launches of all branches."""
    return [launch for branch in branches for launch in branch.launches]


PLACE = ir.StringImm("the kernels that are not Triton's")
"""This statement stands for the kernels that are not Triton's until they are put in."""


@dataclass(frozen=True)
class Others:
    """A scheduled function for the sizes that no launch of Triton is for."""

    func: tirx.PrimFunc  # its parameters are `inputs`, then the outputs
    inputs: Sequence[ir.Expr]  # what it is handed: tensors, and numbers


def with_others(func: tirx.PrimFunc, inputs: Sequence[ir.Expr], others: Others) -> tirx.PrimFunc:
    """Return `func`, which is handed `inputs` first, with the body of `others` at its `PLACE`."""
    theirs = s_tir.renew_defs(others.func)
    mine = dict(zip(inputs, func.params, strict=False))
    given = [*(mine[v] for v in others.inputs), *func.params[len(mine) :]]
    places = dict(zip(theirs.params, given, strict=False))
    for var, place in list(places.items()):
        if tirx.is_buffer_var(var):
            sizes = zip(var.ty.shape, place.ty.shape, strict=True)
            places |= {size: actual for size, actual in sizes if isinstance(size, ir.Var)}
    body = structural_map(theirs.body, (ir.Var, lambda v: places.get(v, v)))

    def put(stmt: tirx.Evaluate) -> tirx.Stmt:
        found = isinstance(stmt.value, ir.StringImm) and stmt.value.value == PLACE.value
        return body if found else stmt

    whole = structural_map(func.body, (tirx.Evaluate, put))
    done = others.func.without_attr(PLAN_ATTR).without_attr(WORKLOAD_ATTR)
    return func.with_body(whole).with_attrs({**dict(done.attrs), **dict(func.attrs)})
