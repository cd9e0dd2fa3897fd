"""How a model that was compiled ahead of time is called, and what is wrong with a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..validation import Natural, shown

MOST_TOLD = 4
"""The most inputs of which the text of an interface tells."""


@dataclass(frozen=True)
class Interface:
    """How a compiled model is called from outside.

    An input is a tensor or a number anywhere in the arguments.
    """

    module: str
    """The class of the model."""
    device: str
    """Where its tensors are."""
    held: tuple[str, ...]
    """The names of the weights and buffers that are the first arguments of the graph."""
    parameters: tuple[str, ...]
    """The names of the arguments that can be passed by place, in order."""
    places: Natural
    """How many of them the model was compiled with by place."""
    keywords: tuple[str, ...]
    """The names of the arguments that it was compiled with by name, in order."""
    names: tuple[str, ...]
    """What each input is called."""
    shapes: tuple[tuple[tuple[Natural, Natural | None], ...], ...]
    """The least and the largest size of each dimension of each input; None for no limit."""
    symbols: tuple[tuple[tuple[str, int, int], ...], ...]
    """For each dimension of each input a symbol, a factor and an offset that make its size; the
    symbol is empty where the size is fixed, or another expression."""
    dtypes: tuple[str, ...]
    """The dtype of each input; empty for what is no tensor."""
    constants: tuple[bool | int | float | str | None, ...]
    """The inputs that are no tensors, which are a part of the code; None for the others."""
    mutated: tuple[tuple[Natural, Natural], ...]
    """The argument of the graph that takes a result, and the number of that result; the caller gets
    those behind."""
    results: tuple[tuple[bool, bool | int | float | str | None], ...]
    """Whether a result is a tensor, and what it is if not."""
    replay: bool
    """Whether calls are captured as CUDA graphs."""

    def __str__(self) -> str:
        """Render as ``Linear on cpu: x float32 [1 to 512, 64]``."""
        told = [
            f"{name} {dtype} [{', '.join(_limits(*size) for size in sizes)}]" if dtype else name
            for name, dtype, sizes in zip(self.names, self.dtypes, self.shapes, strict=True)
        ]
        more = ", ..." if len(told) > MOST_TOLD else ""
        return f"{self.module} on {self.device}: {', '.join(told[:MOST_TOLD])}{more}"

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, in the order of the example's.

        Raises `TypeError` if one is missing, unknown or given twice; the message names it.
        """
        if len(args) > len(self.parameters):
            most = len(self.parameters)
            raise TypeError(f"{len(args)} arguments are passed by place; the model takes {most}")
        given = dict(zip(self.parameters, args, strict=False))
        if twice := [name for name in kwargs if name in given]:
            raise TypeError(f"{_named(twice)} passed both by place and by name")
        given |= kwargs
        wanted = (*self.parameters[: self.places], *self.keywords)
        if missing := [name for name in wanted if name not in given]:
            raise TypeError(f"{_named(missing)} missing; the model takes {', '.join(wanted)}")
        if unknown := [name for name in given if name not in wanted]:
            takes = ", ".join(wanted) or "none"
            raise TypeError(f"{_named(unknown)} unknown; the model was compiled with {takes}")
        return {name: given[name] for name in wanted}

    def inputs(self, arguments: Mapping[str, Any], trees: Sequence[pytree.TreeSpec]) -> list[Any]:
        """Return the inputs in arguments that are nested as `trees` are.

        Raises `TypeError` if an argument is nested otherwise.  Raises `ValueError` if an input has
        another dtype, rank, size or device than the model was compiled for, or is another number.
        """
        inputs = []
        for (name, value), tree in zip(arguments.items(), trees, strict=True):
            flat, found = pytree.tree_flatten(value)
            if found != tree:
                wanted, got = pytree.treespec_pprint(tree), pytree.treespec_pprint(found)
                raise TypeError(f"argument {name!r} is nested as {got}; must be {wanted}")
            inputs += flat
        sizes: dict[str, tuple[int, str]] = {}
        for n, value in enumerate(inputs):
            if self.dtypes[n]:
                self._check_tensor(n, value)
                self._check_sizes(n, value, sizes)
            elif type(value) is not type(self.constants[n]) or value != self.constants[n]:
                raise ValueError(
                    f"argument {self.names[n]!r} is {shown(value)}; the model was compiled with "
                    f"{self.constants[n]!r}"
                )
        return inputs

    def _check_tensor(self, n: int, value: Any) -> None:
        dtype, rank, name = f"torch.{self.dtypes[n]}", len(self.shapes[n]), self.names[n]
        if not isinstance(value, torch.Tensor):
            told, wanted = f"a {type(value).__name__}", f"a tensor of {dtype}"
        elif str(value.dtype) != dtype:
            told, wanted = f"of {value.dtype}", f"of {dtype}"
        elif str(value.device) != self.device:
            told, wanted = f"on {value.device}", f"on {self.device}"
        elif value.dim() != rank:
            told, wanted = f"of {value.dim()} dimensions, {list(value.shape)}", f"of {rank}"
        else:
            return
        raise ValueError(f"argument {name!r} is {told}; must be {wanted}")

    def _check_sizes(self, n: int, value: torch.Tensor, sizes: dict[str, tuple[int, str]]) -> None:
        """Compare sizes with their limits, and with those that are tied to them."""
        for axis, (least, most) in enumerate(self.shapes[n]):
            size, where = value.shape[axis], f"dimension {axis} of argument {self.names[n]!r}"
            if size < least or (most is not None and size > most):
                raise ValueError(f"{where} is {size}; must be {_limits(least, most)}")
            symbol, factor, offset = self.symbols[n][axis]
            if not symbol:
                continue
            found = (size - offset) // factor, f"{where} is {size}"
            known, first = sizes.setdefault(symbol, found)
            wanted = known * factor + offset
            if wanted == size:
                continue
            must = f"{wanted}, as {first}"
            if first == found[1]:
                must = f"{factor} * n + {offset}, with a whole n"
            raise ValueError(f"{where} is {size}; must be {must}")


def _limits(least: int, most: int | None) -> str:
    return str(least) if least == most else f"{least} to {most or 'any'}"


def _named(names: Sequence[str]) -> str:
    told = ", ".join(map(repr, names))
    return f"argument {told} is" if len(names) == 1 else f"arguments {told} are"
