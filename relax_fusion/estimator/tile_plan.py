"""The tile numbers of one kernel, made in one place and read by every back end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..errors import TilePlanError
from ..validation import Count, Natural, check, read, shown

PLAN_ATTR = "relax_fusion.tile_plan"
"""The PrimFunc attribute that carries a `PlanTable`."""


FORMER_NAMES = {"skinny": "few_rows"}
"""Families of plans that were written down under another name."""


@dataclass(frozen=True)
class TilePlan:
    """Tile sizes and launch numbers of one kernel.

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
    split_m : int
        Parts that the rows are cut into, however many they are, where tasks take all rows.
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
    split_m: Count = 1

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
        """The tile for people to read, with the kernel family and what `split_k` counts."""
        what = "groups" if self.family in ("groups", "halves") else "parts"
        parts = f", {self.split_k} {what}" if self.split_k > 1 else ""
        return f"{self.family} {self.block_m}x{self.block_n}x{self.block_k}{parts}".lstrip()

    def to_attr(self) -> dict[str, int | str]:
        """Return the fields as a flat dictionary, the form of a PrimFunc attribute."""
        return asdict(self)

    @staticmethod
    def from_attr(attr: Mapping[str, Any]) -> TilePlan:
        """Read a plan from a dictionary, complaining about unknown and missing fields.

        Parameters
        ----------
        attr : mapping
            Field names to values, as `to_attr` writes them.

        Raises
        ------
        TilePlanError
            If a field is unknown, lacks a value, or has a value that a plan cannot take.
        """
        return read(TilePlan, attr, TilePlanError, "tile plan")


@dataclass(frozen=True)
class PlanTable:
    """Plans for ranges of the dynamic dimension, smallest range first.

    Parameters
    ----------
    entries : tuple of (int or None, TilePlan)
        ``(upper, plan)``: `plan` serves sizes up to and including `upper`; the last `upper` is
        None and serves the rest.
    """

    entries: tuple[tuple[Count | None, TilePlan], ...]

    def __post_init__(self) -> None:
        """Check that the ranges rise and cover everything, and that one back end serves them."""
        check(self, TilePlanError, "plan table")
        uppers = [u for u, _ in self.entries]
        if not uppers or uppers[-1] is not None or None in uppers[:-1]:
            raise TilePlanError("plan table: the last range, and only it, must be open (None)")
        backends = sorted({plan.backend for _, plan in self.entries})
        if len(backends) > 1:
            raise TilePlanError(f"plan table: one kernel has one back end, not {backends}")
        bounded = [u for u in uppers if u is not None]
        if bounded != sorted(set(bounded)):
            raise TilePlanError(f"plan table: upper bounds {bounded} must rise")

    @property
    def key(self) -> str:
        """The plan's key, or a digest of the ranges where there are several."""
        if len(self.entries) == 1:
            return self.entries[0][1].key
        digest = hashlib.sha1(repr(self).encode()).hexdigest()[:8]
        return f"{len(self.entries)}ranges_{digest}"

    def plan_for(self, size: int) -> TilePlan:
        """Return the plan that serves `size` (rows, or query positions of an attention)."""
        return next(plan for upper, plan in self.entries if upper is None or size <= upper)

    def to_attr(self) -> list[dict[str, int | str]]:
        """Return the table as a list of flat dictionaries; ``upper`` is -1 in the open range."""
        return [{"upper": -1 if u is None else u, **p.to_attr()} for u, p in self.entries]

    @staticmethod
    def from_attr(attr: Iterable[Mapping[str, Any]]) -> PlanTable:
        """Read a table from the form that `to_attr` writes.

        Raises
        ------
        TilePlanError
            If a plan is none, or the ranges do not rise to an open one.
        """
        rows = list(attr) if isinstance(attr, Iterable) else [attr]
        if not all(isinstance(row, Mapping) for row in rows):
            raise TilePlanError(f"plan table is {shown(attr)}; must be a list of mappings")
        entries = []
        for row in rows:
            plan = TilePlan.from_attr({k: v for k, v in row.items() if k != "upper"})
            entries.append((None if row.get("upper") == -1 else row.get("upper", 0), plan))
        return PlanTable(tuple(entries))

    @staticmethod
    def single(plan: TilePlan) -> PlanTable:
        """Return the table in which `plan` serves every size."""
        return PlanTable(((None, plan),))
