"""The tile numbers of one kernel, made in one place and read by every back end."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from ..errors import TilePlanError
from ..validation import Count, Natural, check, read, shown

PLAN_ATTR = "relax_fusion.tile_plan"
"""The PrimFunc attribute that carries a `PlanTable`."""


FORMER_NAMES = {"skinny": "few_rows"}
"""Families of plans that were written down under another name."""

FORMER_FIELDS = {"split_m": 1}
"""Fields that every plan had, with the values that say nothing."""

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
    backend : {"tir", "triton"}
        Who emits the kernel.
    family : str
        Which of the kernels of the back end; "" is TIR's usual one for each workload.
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
    backend: Literal["tir", "triton"] = "tir"
    family: str = ""

    def __post_init__(self) -> None:
        """Refuse numbers that no device could run."""
        if self.family in FORMER_NAMES:
            object.__setattr__(self, "family", FORMER_NAMES[self.family])
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
        return f"{self.family} {self.block_m}x{self.block_n}x{self.block_k}{parts}".lstrip()

    def to_attr(self) -> dict[str, int | str]:
        """Return the fields as a flat dictionary, the form of a PrimFunc attribute."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @staticmethod
    def from_attr(attr: Mapping[str, Any]) -> TilePlan:
        """Read a plan from a dictionary, complaining about unknown and missing fields.

        Parameters
        ----------
        attr : mapping
            Field names to values, as `to_attr` writes them.  Plans of families that share back end
            and name are told apart by their fields; where some are left out, the plan is of the
            type that has most.

        Raises
        ------
        TilePlanError
            If a field is unknown, lacks a value, or has a value that a plan cannot take.
        """
        if not isinstance(attr, Mapping):
            return read(TilePlan, attr, TilePlanError, "tile plan")
        name = str(attr.get("family", ""))
        where = str(attr.get("backend", "tir")), FORMER_NAMES.get(name, name)
        for load in FAMILY_LOADERS if where not in PLAN_TYPES else ():
            load()
        kinds = PLAN_TYPES.get(where, [TilePlan])
        exact = (kind for kind in kinds if set(attr) == {f.name for f in fields(kind)})
        kind = next(exact, max(kinds, key=lambda kind: len(fields(kind))))
        return read(kind, kind.renamed(attr), TilePlanError, "tile plan")

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
        return read(cls, cls.renamed(given), TilePlanError, f"tile plan of family {plan.family!r}")

    @classmethod
    def renamed(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields, as they were once written, under the names that they have now."""
        own = {f.name for f in fields(cls)}
        return {
            name: value
            for name, value in given.items()
            if name in own or type(value) is not int or FORMER_FIELDS.get(name) != value
        }


PLAN_TYPES: dict[tuple[str, str], list[type[TilePlan]]] = {}
"""What the plans of families are, by back end and name; the registry fills it."""

FAMILY_LOADERS: list[Callable[[], None]] = []
"""What brings families that are not in `PLAN_TYPES` yet."""


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
        """Refuse bounds that are no sizes."""
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
        serves the rest (None, or a box without bounds).  Plans may be of several families and back
        ends.
    """

    entries: tuple[tuple[Box | Count | None, TilePlan], ...]

    def __post_init__(self) -> None:
        """Check that the boxes cover everything, and that each serves something."""
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
    def backends(self) -> frozenset[str]:
        """Who emits its kernels."""
        return frozenset(plan.backend for _, plan in self.entries)

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

    def to_attr(self) -> list[dict[str, Any]]:
        """Return the table as a list of flat dictionaries: plans, each with the bounds of its box.

        ``upper`` is of rows, -1 for none; ``keys`` and ``batch`` are there where they are bounded.
        """
        return [
            {"upper": box.rows or -1, **replace(box, rows=None).bounds, **plan.to_attr()}
            for box, plan in self.boxes
        ]

    @staticmethod
    def from_attr(attr: Iterable[Mapping[str, Any]]) -> PlanTable:
        """Read a table from the form that `to_attr` writes.

        Raises
        ------
        TilePlanError
            If a plan is none, or the boxes do not end in an open one.
        """
        rows = list(attr) if isinstance(attr, Iterable) else [attr]
        if not all(isinstance(row, Mapping) for row in rows):
            raise TilePlanError(f"plan table is {shown(attr)}; must be a list of mappings")
        entries = []
        for row in rows:
            bounds = {name: row[name] for name in ("keys", "batch") if name in row}
            bounds |= {"rows": row.get("upper", 0)} if row.get("upper") != -1 else {}
            box = read(Box, bounds, TilePlanError, "plan table")
            own = {k: v for k, v in row.items() if k not in ("upper", *bounds)}
            entries.append((box, TilePlan.from_attr(own)))
        return PlanTable.of(entries)

    @staticmethod
    def of(boxes: Iterable[tuple[Box, TilePlan]]) -> PlanTable:
        """Return the table of such boxes; one that bounds rows alone is written as their number."""
        return PlanTable(tuple((b.rows if b == Box(b.rows) else b, p) for b, p in boxes))

    @staticmethod
    def single(plan: TilePlan) -> PlanTable:
        """Return the table in which `plan` serves every size."""
        return PlanTable(((None, plan),))
