"""Counting the sizes that functions of a compiled model are called with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tvm
from tvm import ir, relax, tirx

Place = tuple[int, int, str]
"""Number of the argument, number of the dimension, and the name of the symbolic size there."""


class Callables(Protocol):
    """What functions are taken from by their names, as from a virtual machine."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Return a function."""


class Recorder:
    """Counts calls of functions by the values that their symbolic sizes have.

    All sizes of the kernels follow from those of the arguments, so nothing is done for a kernel: a
    call takes about a microsecond longer for each size.

    Parameters
    ----------
    places : mapping of str to sequence of Place
        By function, where its symbolic sizes stand in the shapes of its arguments.

    Attributes
    ----------
    calls : dict of str to Counter
        By function, how often it was called with which values of its sizes, in the order of
        `names`.
    """

    def __init__(self, places: Mapping[str, Sequence[Place]]):
        self.places = {name: tuple(where) for name, where in places.items()}
        self.calls: dict[str, Counter[tuple[int, ...]]] = {name: Counter() for name in places}

    @staticmethod
    def of_module(mod: ir.IRModule, functions: Sequence[str]) -> Recorder:
        """Return a recorder of functions of a module, whose parameters say their sizes."""
        shapes = {name: [_sizes(param.ty) for param in mod[name].params] for name in functions}
        return Recorder.of_shapes(shapes)

    @staticmethod
    def of_shapes(shapes: Mapping[str, Sequence[Sequence[int | str]]]) -> Recorder:
        """Return a recorder of functions by the shapes of their arguments.

        Parameters
        ----------
        shapes : mapping of str to sequence of shapes
            A symbolic size is its name; expressions of names are passed over.
        """
        places: dict[str, list[Place]] = {}
        for function, arguments in shapes.items():
            found: dict[str, Place] = {}
            for number, shape in enumerate(arguments):
                for axis, size in enumerate(shape):
                    if isinstance(size, str) and size.isidentifier():
                        found.setdefault(size, (number, axis, size))
            places[function] = list(found.values())
        return Recorder(places)

    def names(self, function: str) -> tuple[str, ...]:
        """Return the names of the symbolic sizes of a function."""
        return tuple(name for _, _, name in self.places[function])

    def watched(self, machine: Callables) -> Callables:
        """Return what gives the functions of a virtual machine, and counts their calls."""
        return _Watched(machine, self)

    def to_record(self) -> dict[str, list[dict[str, Any]]]:
        """Return, by function, a list of ``sizes`` (by name) and ``calls``, the smallest first."""
        return {
            function: [
                {"sizes": dict(zip(self.names(function), values, strict=True)), "calls": calls}
                for values, calls in sorted(counted.items())
            ]
            for function, counted in self.calls.items()
            if counted
        }


class _Watched:
    """A virtual machine whose calls are counted."""

    def __init__(self, machine: Callables, recorder: Recorder):
        self._machine, self._recorder = machine, recorder

    def __getitem__(self, name: str) -> Callable[..., Any]:
        function = self._machine[name]
        places = self._recorder.places.get(name)
        if places is None:
            return function
        counted = self._recorder.calls[name]

        def call(*args: Any) -> Any:
            counted[tuple(_size(args[number], axis) for number, axis, _ in places)] += 1
            return function(*args)

        return call


def _size(arg: Any, axis: int) -> int:
    """Return one size of an argument: a tensor, or a shape."""
    return int(arg[axis] if isinstance(arg, tvm.runtime.ShapeTuple) else arg.shape[axis])


def _sizes(ty: ir.Type) -> list[int | str]:
    """Return the sizes of a parameter; nothing of a tuple, whose tensors repeat others' sizes."""
    if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr):
        values = ty.shape.values
    elif isinstance(ty, relax.ShapeType):
        values = ty.values or ()
    else:
        return []
    return [int(v) if isinstance(v, tirx.IntImm) else str(v) for v in values]
