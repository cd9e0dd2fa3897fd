"""The tile numbers of one kernel, made in one place and read by every back end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

from ..errors import TilePlanError
from ..validation import Count, Natural, check, read
from .shape import Size, box_sizes

PLAN_ATTR = "relax_fusion.tile_plan"
"""The PrimFunc attribute that carries a `PlanTable`."""


P = TypeVar("P", bound="TilePlan")


@dataclass(frozen=True)
class TilePlan:
    """Tile sizes and launch numbers of one kernel.

    A family whose kernels have other numbers as well declares a frozen dataclass that derives from
    this one, with a default for each of its fields, and names it as `KernelFamily.plan`.

    Parameters
    ----------
    block_m, block_n, block_k : int
        Rows, columns and reduced elements that one task holds at once: a thread block on a GPU, a
        work item of the thread pool on a CPU.  For attention: query rows, key positions, features.
    reg_m, reg_n : int
        Rows and columns that one thread (of tensor cores: one warp) accumulates in registers; they
        divide `block_m`, `block_n`.
    lanes : int
        Elements of one vector operation (CPU) or vector load (GPU).
    split_k : int
        Parts that the reduction is cut into, added up at the end.
    num_stages : int
        Depth of the load pipeline.
    num_warps : int
        Warps of a GPU thread block; 0 on a CPU.
    family : str
        The kernel: one of the names of a `KernelFamily`.
    """

    block_m: Count
    block_n: Count
    block_k: Count
    reg_m: Count = 1
    reg_n: Count = 1
    lanes: Count = 1
    split_k: Count = 1
    num_stages: Count = 1
    num_warps: Natural = 0
    family: str = ""

    def __post_init__(self) -> None:
        check(self, TilePlanError, "tile plan")
        for block, reg in (("block_m", "reg_m"), ("block_n", "reg_n")):
            if getattr(self, block) % getattr(self, reg):
                raise TilePlanError(
                    f"tile plan: {reg}={getattr(self, reg)} does not divide "
                    f"{block}={getattr(self, block)}"
                )

    @property
    def key(self) -> str:
        """A name that tells the tile and, by six hex digits, every other field."""
        digest = hashlib.sha1(repr(self).encode()).hexdigest()[:6]
        return f"{self.block_m}x{self.block_n}x{self.block_k}_{digest}"

    @property
    def text(self) -> str:
        """The tile for people to read, with the kernel family and the parts of the reduction."""
        parts = f", {self.split_k} parts" if self.split_k > 1 else ""
        return f"{self.family} {self.block_m}x{self.block_n}x{self.block_k}{parts}"

    def to_attr(self) -> dict[str, int | str]:
        """Return the fields as a flat dictionary, the form of a PrimFunc attribute."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def of(cls: type[P], plan: TilePlan) -> P:
        """Return `plan` as one of this type.

        Raises
        ------
        TilePlanError
            If a field that this type lacks has another value than its default.
        """
        if type(plan) is cls:
            return plan
        own = {f.name for f in fields(cls)}
        told = [f.name for f in fields(plan) if f.name in own or getattr(plan, f.name) != f.default]
        given = {name: getattr(plan, name) for name in told}
        return read(cls, given, TilePlanError, f"tile plan of family {plan.family!r}")


@dataclass(frozen=True)
class Box:
    """Sizes up to which a plan serves, the bounds included; None: any size.

    Parameters
    ----------
    rows : int, optional
        Rows of a matmul workload, query positions of an attention.
    keys, batch : int, optional
        Key positions and sequences of an attention.
    """

    rows: Count | None = None
    keys: Count | None = None
    batch: Count | None = None

    def __post_init__(self) -> None:
        check(self, TilePlanError, "box")

    def __str__(self) -> str:
        """Return the bounds: ``"rows <= 16, keys <= 1024"``."""
        bounds = [f"{name} <= {upper}" for name, upper in self.bounds.items()]
        return ", ".join(bounds) or "any size"

    @cached_property
    def bounds(self) -> dict[str, int]:
        """The bounds that there are, by what they are of."""
        every = {"rows": self.rows, "keys": self.keys, "batch": self.batch}
        return {name: upper for name, upper in every.items() if upper is not None}

    def holds(self, **sizes: int) -> bool:
        """Tell whether sizes are within the bounds; one that is not given is."""
        return all(sizes.get(name, 0) <= upper for name, upper in self.bounds.items())

    def within(self, other: Box) -> bool:
        """Tell whether `other` holds wherever this box does."""
        own = self.bounds
        return all(name in own and own[name] <= upper for name, upper in other.bounds.items())


OPEN = Box()
"""Every size."""


@dataclass(frozen=True)
class PlanTable:
    """Plans for boxes of the dynamic dimensions; the first box that holds decides.

    Parameters
    ----------
    entries : tuple of (Box, int or None; TilePlan)
        Up to which sizes, bounds included, and by which plan; a number is of rows.  The last entry
        serves the rest (None, or a box without bounds).  Plans may be of several families.
    """

    entries: tuple[tuple[Box | Count | None, TilePlan], ...]

    def __post_init__(self) -> None:
        check(self, TilePlanError, "plan table")
        boxes = [box for box, _ in self.boxes]
        if not boxes or boxes[-1] != OPEN:
            raise TilePlanError("plan table: the last range must be open (None)")
        for index, box in enumerate(boxes):
            hidden = next((first for first in boxes[:index] if box.within(first)), None)
            if hidden is not None:
                raise TilePlanError(
                    f"plan table: {box} comes behind {hidden}, which serves it; bounds must rise"
                )

    @cached_property
    def boxes(self) -> tuple[tuple[Box, TilePlan], ...]:
        """The entries with boxes alone."""
        return tuple((u if isinstance(u, Box) else Box(u), p) for u, p in self.entries)

    @property
    def key(self) -> str:
        """The plan's key, or a digest of the ranges where there are several."""
        if len(self.entries) == 1:
            return self.entries[0][1].key
        digest = hashlib.sha1(repr(self).encode()).hexdigest()[:8]
        return f"{len(self.entries)}ranges_{digest}"

    def plan_for(self, rows: int, **sizes: int) -> TilePlan:
        """Return the plan that serves so many rows (query positions), and `keys` and `batch`."""
        return next(plan for box, plan in self.boxes if box.holds(rows=rows, **sizes))

    def plan_at(self, size: Size) -> TilePlan:
        """Return the plan that serves a size."""
        return self.plan_for(**box_sizes(size))

    def to_attr(self) -> list[dict[str, Any]]:
        """Return the table as a list of flat dictionaries: plans, each with the bounds of its box.

        ``upper`` is of rows, -1 for none; ``keys`` and ``batch`` are there where they are bounded.
        """
        return [
            {"upper": box.rows or -1, **replace(box, rows=None).bounds, **plan.to_attr()}
            for box, plan in self.boxes
        ]

    @staticmethod
    def of(boxes: Iterable[tuple[Box, TilePlan]]) -> PlanTable:
        """Return the table of such boxes; one that bounds rows alone is written as their number."""
        return PlanTable(tuple((b.rows if b == Box(b.rows) else b, p) for b, p in boxes))

    @staticmethod
    def single(plan: TilePlan) -> PlanTable:
        """Return the table in which `plan` serves every size."""
        return PlanTable(((None, plan),))
