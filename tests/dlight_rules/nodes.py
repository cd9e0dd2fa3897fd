"""Nodes of TIR for code that meets the same ones again and again."""

from __future__ import annotations

from functools import cached_property
from threading import RLock
from typing import Any

import numpy as np
import tvm_ffi

from relax_fusion.workload.reference import numpy_dtype

_ASKING = RLock()
"""One thread asks TVM at a time: the blocks of a cluster are threads, and runs of them beside other
load ended in segmentation faults."""


class Node:
    """A node of TIR that asks TVM for each of its fields only once.

    Fields that are nodes are `Node`s as well, arrays are tuples of them.  One variable or buffer
    is one `Node` wherever it occurs below the first.

    Parameters
    ----------
    node : tvm_ffi.Object
        The node.
    known : dict, optional
        All `Node`s below the first, by the address of the node.
    """

    def __init__(self, node: Any, known: dict[int, Node] | None = None) -> None:
        self.node, self.kind = node, type(node).__name__
        self.known: dict[int, Node] = {} if known is None else known

    def __getattr__(self, name: str) -> Any:
        with _ASKING:
            found = self.__dict__[name] = self.of(getattr(self.node, name))
        return found

    def __int__(self) -> int:
        return int(self.value)

    def __str__(self) -> str:
        return str(self.node)

    def of(self, value: Any) -> Any:
        """Return what stands here for a value of TVM."""
        if type(value) is tvm_ffi.Array:
            return tuple(map(self.of, value))
        if isinstance(value, tvm_ffi.Object):
            return self.known.setdefault(value.__chandle__(), Node(value, self.known))
        return value

    @cached_property
    def number(self) -> np.ndarray:
        """The value of an integer, in its dtype."""
        return np.asarray(int(self.value), numpy_dtype(str(self.ty.dtype)))
