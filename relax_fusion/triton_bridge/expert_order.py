"""Pairs are sorted by their experts once for all products by the same choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tvm import ir, relax, tirx

from ..estimator.families.triton_experts import TILES
from ..estimator.ranges import served
from ..estimator.tile_plan import PlanTable
from ..hardware import DeviceSpec
from ..launch.arguments import Out
from ..matching.pattern import calls_kernel
from ..matching.stages import is_view
from ..transforms.modules import bindings_of, functions_of
from ..workload import DynamicDim, ExpertMatmul
from .experts import ExpertOrder, order_steps
from .launches import AnyStep

PLACE_OF_IDS = 1
"""Where numbers of experts are among the operands of an `ExpertMatmul`."""

Spans = frozenset[tuple[int, int | None]]
"""Numbers of rows: those beyond the first number, up to the second one, without end if None."""


@dataclass(frozen=True)
class ExpertSort:
    """A function that sorts the pairs of a choice where a product reads them sorted.

    Equal ones are the same function.
    """

    experts: int
    chosen: int
    spans: Spans
    ids_type: tuple[int | None, str]  # rows, None where they are known at run time, and the dtype
    ids: relax.Var = field(compare=False)  # its parameter, ``[rows, chosen]``
    func: tirx.PrimFunc = field(compare=False)  # of a product that reads the result
    others: None = None  # each size has launches of Triton, or none

    @staticmethod
    def of(
        work: ExpertMatmul, plans: PlanTable, ids: relax.Var, func: tirx.PrimFunc
    ) -> ExpertSort | None:
        """Return what a product asks for; None where no plan of its reads sorted pairs."""
        rows, spans, before = work.rows, set[tuple[int, int | None]](), 0
        for bounds, plan in served(work, plans):
            upper = bounds.get(rows.name) if isinstance(rows, DynamicDim) else None
            spans |= {(before, upper)} if plan.family == TILES else set()
            before = upper or 0
        if not spans:
            return None
        known = (None if isinstance(rows, DynamicDim) else rows), work.ids_dtype
        return ExpertSort(work.experts, work.chosen, frozenset(spans), known, ids, func)

    def both(self, other: ExpertSort) -> ExpertSort:
        """Return what serves the sizes of two."""
        return replace(self, spans=self.spans | other.spans)

    @property
    def outputs(self) -> list[relax.TensorType]:
        """What `ExpertOrder` has."""
        return [var.ty for var in self.result]

    @property
    def result(self) -> ExpertOrder:
        """New variables of what is found, for products that read it."""
        rows, chosen = self.ids.ty.shape.values
        shapes = ExpertOrder((rows * chosen,), (self.experts + 1,))
        types = [relax.TensorType(shape, "int32", self.ids.ty.vdevice) for shape in shapes]
        return ExpertOrder(*map(relax.Var, ExpertOrder._fields, types))

    def cases(self, dev: DeviceSpec) -> list[tuple[Any, Sequence[AnyStep]]]:
        """Return for which sizes something is launched, and what; for others there is nothing."""
        rows, known = self.ids.ty.shape.values[0], self.ids_type[0]
        ends = [end for _, end in self.spans if end is not None]
        most = max(ends) if len(ends) == len(self.spans) else known
        given = self.ids, ExpertOrder(Out(0), Out(1)), self.experts
        pairs = None if most is None else most * self.chosen
        steps = order_steps(*given, pairs, dev.capabilities.dependent_launch)
        if (0, None) in self.spans:
            return [(True, steps)]
        inside = (tirx.all(rows > a, *([] if b is None else [rows <= b])) for a, b in self.spans)
        return [(tirx.any(*inside), steps), (True, [])]

    def key(self, ids: relax.Expr) -> tuple[relax.Expr, int, int]:
        """Return by what a sort of numbers of experts is found among those of a function."""
        return ids, self.experts, self.chosen


def expert_sorts(
    mod: ir.IRModule, asked: Mapping[ir.GlobalVar, ExpertSort]
) -> dict[Any, tuple[Any, ExpertSort]]:
    """Return of which numbers pairs are sorted, and how, for all that read the result.

    Both by `ExpertSort.key`, of numbers that calls have and of those that they are a view of.
    `asked` has what the functions of products ask for.
    """
    found: dict[Any, tuple[Any, ExpertSort]] = {}
    for func in functions_of(mod, relax.Function).values():
        views: dict[relax.Expr, relax.Expr] = {}
        every: dict[Any, ExpertSort] = {}
        for binding, _ in bindings_of(func.body):
            call = binding.value
            if not calls_kernel(call):
                continue
            args = call.args[1].fields
            if len(args) == 1 and is_view(mod[call.args[0]]):
                views[binding.var] = views.get(args[0], args[0])
            if (sort := asked.get(call.args[0])) is not None:
                ids = args[PLACE_OF_IDS]
                source = sort.key(views.get(ids, ids))
                every[source] = every.get(source, sort).both(sort)
                found[sort.key(ids)] = source, sort
        found |= {k: (s, every.get(s, sort)) for k, (s, sort) in found.items()}
    return found
