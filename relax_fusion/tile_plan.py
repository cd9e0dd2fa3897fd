"""The tile numbers of one kernel, made in one place and read by every back end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import TilePlanError

PLAN_ATTR = "relax_fusion.tile_plan"
"""The PrimFunc attribute that carries a `PlanTable`."""


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

    block_m: int
    block_n: int
    block_k: int
    reg_m: int = 1
    reg_n: int = 1
    lanes: int = 1
    split_k: int = 1
    num_stages: int = 1
    num_warps: int = 0
    backend: str = "tir"
    family: str = ""
    split_m: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers that no device could run."""
        blocks, registers = ("block_m", "block_n", "block_k"), ("reg_m", "reg_n", "lanes")
        for name in (*blocks, *registers, "split_k", "split_m"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise TilePlanError(f"tile plan: {name} is {value!r}, must be an integer >= 1")
        if self.num_stages < 1 or self.num_warps < 0:
            raise TilePlanError(
                f"tile plan: num_stages={self.num_stages} must be >= 1 and "
                f"num_warps={self.num_warps} >= 0"
            )
        for block, reg in (("block_m", "reg_m"), ("block_n", "reg_n")):
            if getattr(self, block) % getattr(self, reg):
                raise TilePlanError(
                    f"tile plan: {reg}={getattr(self, reg)} does not divide "
                    f"{block}={getattr(self, block)}"
                )
        if self.backend not in ("tir", "triton"):
            detail = f"backend is {self.backend!r}, must be 'tir' or 'triton'"
            raise TilePlanError(f"tile plan: {detail}")

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
        known = {f.name: f.type for f in fields(TilePlan)}
        values = {str(k): v for k, v in attr.items()}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise TilePlanError(
                f"tile plan: unknown field {unknown[0]!r}; the fields are {', '.join(known)}"
            )
        try:
            typed: dict[str, Any] = {
                k: str(v) if known[k] == "str" else int(v) for k, v in values.items()
            }
            return TilePlan(**typed)
        except (TypeError, ValueError) as err:
            raise TilePlanError(f"tile plan: {err}") from err


@dataclass(frozen=True)
class PlanTable:
    """Plans for ranges of the dynamic dimension, smallest range first.

    Parameters
    ----------
    entries : tuple of (int or None, TilePlan)
        ``(upper, plan)``: `plan` serves sizes up to and including `upper`; the last `upper` is
        None and serves the rest.
    """

    entries: tuple[tuple[int | None, TilePlan], ...]

    def __post_init__(self) -> None:
        """Check that the ranges rise and cover everything, and that one back end serves them."""
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
        entries = []
        for item in attr:
            row = {str(k): v for k, v in item.items()}
            upper = int(row.pop("upper"))
            entries.append((None if upper < 0 else upper, TilePlan.from_attr(row)))
        return PlanTable(tuple(entries))

    @staticmethod
    def single(plan: TilePlan) -> PlanTable:
        """Return the table in which `plan` serves every size."""
        return PlanTable(((None, plan),))
