"""What a kernel family is: the unit in which kernels are added."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, ClassVar, Generic, Literal, NamedTuple

from ..errors import TilePlanError
from ..hardware import DeviceSpec
from ..validation import shown
from . import cpu_cost, gpu_cost
from .prediction import Footprint, Prediction, Price, Step, in_a_row
from .shape import Problem, Size, W
from .tile_plan import TilePlan

Backend = Literal["auto", "tir", "triton"]
"""Which families a user asks for: all of them, those of TIR, or those of Triton and CUDA C++."""


@dataclass(frozen=True)
class Breaks:
    """Where the best plan of a family may change along a dynamic dimension."""

    uppers: tuple[int, ...] = (1, 16, 64, 256)
    """Last sizes of ranges: rows, or query positions of an attention."""
    open_size: int = 1024
    """Where the open range behind them is priced: a usual prompt, past the point where more rows
    change the choice."""
    batches: tuple[int, ...] = (1, 8)
    keys: tuple[int, ...] = (256, 2048)
    """Last sizes of the ranges of an attention's batch and key positions."""
    finer: tuple[int, ...] = ()
    """Last sizes of the small ranges inside of those of `uppers`, to each of which one of a few
    kernels is assigned.  For families whose `Price` takes arrays."""


OWN_BASELINE_ERROR = 0.97
"""`KernelFamily.error` where the parts are priced by the same models as the whole: what is wrong
with them is wrong with both, so no gain is asked for.  A loss counts from 3 % on, about what
predictions of such near alternatives are apart."""


class Offer(NamedTuple):
    """A plan, and for which rows it is worth pricing."""

    plan: TilePlan
    first: int | None = None
    """The fewest rows, or powers of two above them, for which it can be the best; by default those
    of its tile: taller tiles than rows only pad."""
    last: int | None = None
    """The most rows for which it can be the best."""
    most: int | None = None
    """The most rows that one launch can have."""


class KernelFamily(ABC, Generic[W]):
    """A kind of kernel: which workloads it takes, its plans, their limits and their price.

    Attributes
    ----------
    names : tuple of str
        What its plans have in their field `family`; no other family has the same.
    language : {"tir", "triton", "cuda"}
        What its kernels are written in.
    fallback : bool
        Whether it is only for what no other family has a plan for at all sizes.
    most_rows : int, optional
        The rows up to which it has kernels, where larger sizes are left to others.
    error : float
        Factor by which a predicted gain over separate kernels may be wrong.
    norms_heads : bool
        Whether its kernels of projections may normalise the heads that they make.
    instead_of : tuple of type
        Families that are not looked at where this one has a plan: they are never faster.
    plan : type
        Its plans: `TilePlan`, or a dataclass that derives from it, with fields of its own.
    emitter : str
        ``"module:function"``, imported when needed: takes workload, plan table and target, and
        returns a scheduled PrimFunc whose parameters are the operands of ``work.graph``.  Empty for
        the families of this package, whose kernels its own rules and Triton's bridge make.
    breaks : Breaks
        Sizes at which its best plan may change.
    """

    names: ClassVar[tuple[str, ...]]
    language: ClassVar[Literal["tir", "triton", "cuda"]] = "tir"
    fallback: ClassVar[bool] = False
    most_rows: ClassVar[int | None] = None
    error: ClassVar[float]
    norms_heads: ClassVar[bool] = False
    instead_of: ClassVar[tuple[type, ...]] = ()
    plan: ClassVar[type[TilePlan]] = TilePlan
    emitter: ClassVar[str] = ""
    breaks: ClassVar[Breaks] = Breaks()

    @abstractmethod
    def takes(self, problem: Problem[Any]) -> bool:
        """Tell whether it is for such workloads on such devices, of which it may refuse some."""

    def refuses(self, problem: Problem[W]) -> str | None:
        """Return why there is no kernel for a problem that it takes, whatever the plan."""
        return None

    @abstractmethod
    def plans(self, problem: Problem[W]) -> Iterator[Offer]:
        """Yield plans worth pricing, which may not all fit; of equal prices, the first is taken."""

    @abstractmethod
    def violations(self, plan: TilePlan, problem: Problem[W]) -> Iterator[str]:
        """Yield why `plan` cannot run a problem: one sentence each, with both numbers."""

    @abstractmethod
    def price(self, plan: TilePlan, problem: Problem[W]) -> Price:
        """Return what `plan` costs: `Launches`, or another `Price`."""


@dataclass(frozen=True)
class Launches(Price):
    """The price of launches by the common model of a GPU or a CPU, one after the other."""

    dev: DeviceSpec
    foot: Footprint
    steps: Callable[[Size], Iterable[Step]]

    def at(self, size: Size) -> Prediction:
        """Return what the launches cost; raise `TilePlanError` if there are none."""
        price = cpu_cost.price_step if self.dev.kind == "cpu" else gpu_cost.price_step
        parts = [price(step, self.dev) for step in self.steps(size)]
        if not parts:
            raise TilePlanError(f"a plan has no launches at {size}, must have one")
        return in_a_row(parts)


@dataclass(frozen=True, eq=False)
class Option:
    """A plan for a problem, with the family that it is of."""

    family: KernelFamily[Any]
    problem: Problem[Any]
    offer: Offer

    @property
    def plan(self) -> TilePlan:
        """The plan."""
        return self.offer.plan

    @cached_property
    def price(self) -> Price:
        """What it costs."""
        return self.family.price(self.plan, self.problem)

    def is_worth(self, least: int, most: int) -> bool:
        """Tell whether it can be the best for some numbers of rows."""
        _, first, last, _ = self.offer
        return (self.plan.block_m if first is None else first) <= most and (
            last is None or least <= last
        )


def _all(kind: type, values: Any) -> bool:
    return isinstance(values, tuple) and all(isinstance(v, kind) for v in values)


def _is_plan(kind: Any) -> bool:
    derives = isinstance(kind, type) and issubclass(kind, TilePlan)
    return derives and "__dataclass_fields__" in vars(kind)


_ATTRIBUTES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "names": (lambda v: _all(str, v) and bool(v), "a tuple of text"),
    "language": (("tir", "triton", "cuda").__contains__, "'tir', 'triton' or 'cuda'"),
    "fallback": (lambda v: isinstance(v, bool), "a bool"),
    "most_rows": (lambda v: v is None or (type(v) is int and v > 0), "a number of rows or None"),
    "error": (lambda v: isinstance(v, int | float) and 0 < v < inf, "a number above 0"),
    "instead_of": (lambda v: _all(type, v), "a tuple of families' classes"),
    "plan": (_is_plan, "a dataclass that derives from TilePlan"),
    "emitter": (
        lambda v: isinstance(v, str) and bool(re.fullmatch(r"\w+(\.\w+)*:\w+", v)),
        "module:function",
    ),
    "breaks": (lambda v: isinstance(v, Breaks), "Breaks"),
}
"""What a family from outside has: the test of each attribute, and what it asks for."""


def check_attributes(family: KernelFamily[Any]) -> None:
    """Refuse a family from outside with attributes that no family can have.

    Raises `TilePlanError`; the message names the attribute, its value and what is allowed.
    """
    own = type(family).__name__
    for name, (holds, needs) in _ATTRIBUTES.items():
        value = getattr(family, name, None)
        if not holds(value):
            raise TilePlanError(f"family {own}: {name} is {shown(value)}, must be {needs}")
