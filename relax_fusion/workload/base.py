"""What all named workloads share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal

from .dims import Dim
from .graph import Graph
from .roofline import Sizes, distinct_bytes, matmul_flops


@dataclass(frozen=True)
class Atom:
    """One of the kernels that compute a chain which is left apart."""

    moved: int = 0
    """Bytes that it reads and writes, each once, beside the operands of `matmul`."""
    matmul: Any = None
    """What it multiplies; None for a norm, a softmax, or element-wise steps."""
    rows: int = 0
    matrices: int = 1
    """Rows of each matrix, or of a softmax, and matrices of a batch."""
    maker: Literal["pass", "rule", "tvm"] = "pass"
    """Who schedules a matmul: a later pass that fuses, the rule for generic matmuls, or, where a
    size that a tile needs is only known at run time, TVM's own rule."""
    normalised: int = 0
    scores: int = 0
    """Elements that a norm reads, and those that a softmax does."""
    slots: int = 0
    """Instructions (`Operator.slots`) of element-wise steps for all elements, beside those of
    `matmul`.  Prices of CPUs count them; a GPU's memory takes longer."""


def repr_without(record: Any, *late: str) -> str:
    """Return a dataclass as Python writes it, without fields `late` that are empty.

    Names of kernels and keys of databases are made of it: a field that is added later leaves them
    as they were.
    """
    found = {f.name: getattr(record, f.name) for f in fields(record)}
    given = (f"{name}={value!r}" for name, value in found.items() if name not in late or value)
    return f"{type(record).__name__}({', '.join(given)})"


class Described:
    """A dataclass that names a chain, and the block graph that says what it computes."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __hash__(self) -> int:
        """Hash the fields once: the estimator looks workloads up for every plan."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(self.__getstate__().values()))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is kept beside the fields: hashes of text differ between processes."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def key(self) -> str:
        """Eight hex digits of the SHA-1 of every field, so that no two kernels share a name."""
        return hashlib.sha1(repr(self).encode()).hexdigest()[:8]

    @cached_property
    def graph(self) -> Graph:
        """What is computed, statement by statement."""
        return self._graph()

    def _graph(self) -> Graph:
        raise NotImplementedError

    @property
    def is_adapted(self) -> bool:
        """Whether a weight has an adapter beside it."""
        return False

    @property
    def head_columns(self) -> int:
        """Columns of projections whose heads are normalised."""
        return 0

    @property
    def is_packed(self) -> bool:
        """Whether weights are stored as words."""
        return False

    @property
    def ranged(self) -> dict[str, Dim]:
        """What plans are chosen by, as it is called in the graph: rows, and what else there is."""
        return {"rows": self.graph["x"].shape[-2]}

    def apart(self, **sizes: int) -> list[Atom]:
        """Return the kernels that compute the chain if the pass that found it leaves it alone.

        `**sizes`: as in `flops`; none may be missing.
        """
        raise NotImplementedError

    def flops(self, **sizes: int) -> float:
        """Return the floating-point operations of the matmuls; masks are not discounted.

        `**sizes`: sizes of the dynamic dimensions, under their names in the graph; others are
        ignored.
        """
        return float(self._at(matmul_flops, sizes))

    def bytes(self, **sizes: int) -> dict[str, int]:
        """Return the bytes of every operand and result, each element counted once.

        `**sizes`: as in `flops`.
        """
        return dict(self._at(distinct_bytes, sizes))

    def _at(self, count: Callable[[Graph, Sizes], Any], sizes: Sizes) -> Any:
        """Count once for each size: the estimator asks for every plan."""
        key = (count, *sizes.items())
        if key not in self._counted:
            self._counted[key] = count(self.graph, sizes)
        return self._counted[key]

    @cached_property
    def _counted(self) -> dict[Any, Any]:
        return {}
