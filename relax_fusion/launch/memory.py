"""The tensors of a PrimFunc that launches kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax

from ..errors import KernelError
from .arguments import InOut, Out, Part, TensorMap, Workspace, is_tensor


@dataclass(frozen=True)
class Buffer:
    """A tensor parameter of the PrimFunc, its sizes in the variables of the caller."""

    name: str
    shape: tuple[Any, ...]
    dtype: str


class Memory:
    """The tensors that a call reads, writes and works in, each a parameter of the PrimFunc.

    Parameters
    ----------
    outputs : sequence of TensorType
        What a call returns.
    rooms : sequence of (Workspace, sequence of Workspace)
        Memory that several workspaces share; the others have their own.
    """

    def __init__(
        self,
        outputs: Sequence[relax.TensorType],
        rooms: Sequence[tuple[Workspace, Sequence[Workspace]]] = (),
    ):
        self.outputs, self.rooms = outputs, rooms
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
            room = self._room(value)
            if not any(w is room for w in self.workspaces):
                self.workspaces.append(room)
        elif is_tensor(value) and self._input(value) < 0:
            if not isinstance(value.ty.shape, relax.ShapeExpr):
                raise KernelError(f"{value} has no known shape: R.match_cast gives it one")
            self.inputs.append(value)

    def _input(self, tensor: relax.Expr) -> int:
        return next((i for i, t in enumerate(self.inputs) if t.same_as(tensor)), -1)

    def _room(self, value: Workspace) -> Workspace:
        """Return the memory of a workspace."""
        return next((r for r, inside in self.rooms if any(w is value for w in inside)), value)

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
            room = self._room(value)
            index = next(i for i, w in enumerate(self.workspaces) if w is room)
            return Buffer(f"workspace{index}", tuple(room.shape), room.dtype)
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
