"""What a kernel family is: the unit in which kernels are added."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Generic, Literal, TypeVar

from ..errors import TilePlanError
from ..hardware import DeviceSpec
from ..validation import shown
from . import cpu_cost, gpu_cost
from .arrays import Seconds, Wanted, one_by_one
from .prediction import Prediction, in_a_row
from .shape import Size
from .steps import Footprint, Step
from .tile_plan import TilePlan

W = TypeVar("W", bound=Any)

Backend = Literal["auto", "tir", "triton"]
"""Which families a user asks for: all of them, those of TIR, or those of Triton and CUDA C++."""


@dataclass(frozen=True)
class Breaks:
    """Where the best plan of a family may change along a dynamic dimension.

    Parameters
    ----------
    uppers : tuple of int
        Last sizes of ranges: rows, or query positions of an attention.
    open_size : int
        Where the open range behind them is priced: a usual prompt, past the point where more rows
        change the choice.
    batches, keys : tuple of int
        Last sizes of the ranges of an attention's batch and key positions.
    finer : tuple of int
        Last sizes of the small ranges inside of those of `uppers`, to each of which one of a few
        kernels is assigned.  For families of which `KernelFamily.seconds` takes arrays.
    """

    uppers: tuple[int, ...] = (1, 16, 64, 256)
    open_size: int = 1024
    batches: tuple[int, ...] = (1, 8)
    keys: tuple[int, ...] = (256, 2048)
    finer: tuple[int, ...] = ()


OWN_BASELINE_ERROR = 0.97
"""`KernelFamily.error` where the parts are priced by the same models as the whole: what is wrong
with them is wrong with both, so no gain is asked for.  A loss counts from 3 % on, about what
predictions of such near alternatives are apart."""


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
    kind : {"gpu", "cpu"}
        Where they run.
    takes : tuple of type
        Classes of workloads.
    error : float
        Factor by which a predicted gain over separate kernels may be wrong.
    instead_of : tuple of type
        Families that are not looked at where this one has a plan: they are never faster.
    adapts : bool
        Whether its kernels add what adapters make (`Projection.adapter`).
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
    kind: ClassVar[Literal["gpu", "cpu"]] = "gpu"
    takes: ClassVar[tuple[type, ...]]
    error: ClassVar[float]
    instead_of: ClassVar[tuple[type, ...]] = ()
    adapts: ClassVar[bool] = False
    plan: ClassVar[type[TilePlan]] = TilePlan
    emitter: ClassVar[str] = ""
    breaks: ClassVar[Breaks] = Breaks()

    def serves(self, work: W) -> bool:
        """Tell whether it is for workloads like `work`, of which another is the counterpart."""
        return True

    def refuses(self, work: W, dev: DeviceSpec) -> str | None:
        """Return why there is no kernel for `work` on `dev`, whatever the plan."""
        return None

    @abstractmethod
    def plans(self, work: W, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield plans worth pricing, which may not all fit; of equal prices, the first is taken."""

    @abstractmethod
    def violations(self, plan: TilePlan, work: W, dev: DeviceSpec) -> Iterator[str]:
        """Yield why `plan` cannot run `work` on `dev`: one sentence each, with both numbers."""

    @abstractmethod
    def footprint(self, plan: TilePlan, work: W, dev: DeviceSpec) -> Footprint:
        """Return what one task of `plan` occupies."""

    def steps(self, plan: TilePlan, work: W, dev: DeviceSpec, size: Size) -> Iterable[Step]:
        """Return the launches of `plan` at `size`, in order; only meaningful without `violations`.

        A family gives these, or else a `predict` of its own.
        """
        return ()

    def predict(self, plan: TilePlan, work: W, dev: DeviceSpec, size: Size) -> Prediction:
        """Return what `steps` cost, one after the other.

        Raises
        ------
        TilePlanError
            If there are none.
        """
        price = cpu_cost.price_step if dev.kind == "cpu" else gpu_cost.price_step
        parts = [price(step, dev) for step in self.steps(plan, work, dev, size)]
        if not parts:
            raise TilePlanError(f"family {type(self).__name__}: plan {plan.key} has no steps")
        return in_a_row(parts)

    def seconds(
        self,
        plans: Sequence[TilePlan],
        work: W,
        dev: DeviceSpec,
        sizes: Sequence[Size],
        wanted: Wanted,
    ) -> Seconds:
        """Return the seconds that `predict` gives of plans at sizes, where they are wanted.

        A family whose model takes arrays computes all of them together.
        """
        return one_by_one(wanted, lambda s, p: self.predict(plans[p], work, dev, sizes[s]).seconds)

    def early_s(self, plan: TilePlan, dev: DeviceSpec) -> float:
        """Return what of a kernel is done before the one in front of it ends, beside launching."""
        return 0.0

    def worth(
        self, plans: Sequence[TilePlan], work: W, dev: DeviceSpec, rows: tuple[int, int]
    ) -> Iterable[TilePlan]:
        """Return those of its plans that can be best for some numbers of tiled rows.

        Taller tiles than rows only pad.

        Parameters
        ----------
        rows : tuple of int
            The fewest, and the power of two that the most fit.
        """
        return (plan for plan in plans if plan.block_m <= rows[1])

    def blocks(self, plan: TilePlan, work: W, most: int | None) -> Iterator[tuple[str, int]]:
        """Yield what lies along the second and third dimension of a grid, and how many blocks.

        Parameters
        ----------
        most : int, optional
            Rows, or query positions, up to which the plan serves; None if nothing bounds them.
        """
        return iter(())


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
    "kind": (("gpu", "cpu").__contains__, "'gpu' or 'cpu'"),
    "takes": (lambda v: _all(type, v) and bool(v), "a tuple of classes of workloads"),
    "error": (lambda v: isinstance(v, int | float) and 0 < v < inf, "a number above 0"),
    "instead_of": (lambda v: _all(type, v), "a tuple of families' classes"),
    "adapts": (lambda v: isinstance(v, bool), "a bool"),
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

    Raises
    ------
    TilePlanError
        The message names the attribute, its value and what is allowed.
    """
    kind, own = type(family), type(family).__name__
    for name, (holds, needs) in _ATTRIBUTES.items():
        value = getattr(family, name, None)
        if not holds(value):
            raise TilePlanError(f"family {own}: {name} is {shown(value)}, must be {needs}")
    if KernelFamily.predict is kind.predict and KernelFamily.steps is kind.steps:
        raise TilePlanError(f"family {own}: has neither steps nor a predict of its own")
