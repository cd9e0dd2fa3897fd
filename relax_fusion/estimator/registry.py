"""The families that there are, the options that they offer, and plans read by their family's name.

Nothing else in the estimator knows a family by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from threading import RLock
from typing import Any

from ..errors import TilePlanError
from ..hardware import DeviceSpec
from ..validation import read, shown
from ..workload import Workload
from .families.cpu_attention import CpuAttention
from .families.cpu_generated.family import CpuGenerated
from .families.cpu_products import CpuProducts
from .families.cpu_tiles import CpuTiles
from .families.cuda_matmul.family import CudaMatmul
from .families.dot_products import DotProducts
from .families.experts import Experts
from .families.few_rows.family import FewRows
from .families.few_rows.packed import PackedRows
from .families.fma_attention import FmaAttention
from .families.fma_tiles import FmaTiles
from .families.generated.family import Generated
from .families.tensor_cores.family import TensorCores
from .families.triton_attention.family import TritonAttention
from .families.triton_experts import TritonExperts
from .families.triton_matmul.family import TritonMatmul
from .families.triton_matmul.packed import PackedGemv
from .families.words import Words
from .family import Backend, KernelFamily, Offer, Option, check_attributes
from .prediction import Footprint, Prediction
from .shape import Problem, Size
from .tile_plan import Box, PlanTable, TilePlan

Family = KernelFamily[Any]

FAMILIES: list[Family] = [
    *(CudaMatmul(), TritonMatmul(), PackedGemv(), TritonAttention(), Generated()),
    *(PackedRows(), DotProducts(), FewRows(), TensorCores(), FmaTiles(), FmaAttention()),
    *(Words(), CpuTiles(), CpuAttention(), CpuProducts(), CpuGenerated()),
    *(TritonExperts(), Experts()),
]
"""Of equal prices, plans of an earlier family are taken."""

_BY_NAME: dict[str, Family] = {name: family for family in FAMILIES for name in family.names}

ENTRY_POINTS = "relax_fusion.families"
"""Group of the entry points by which packages bring families: each a `KernelFamily`."""

ON_CHANGE: list[Callable[[], None]] = []
"""What forgets answers that another family would change."""


def register_family(family: Family) -> None:
    """Add a family, in front of all others.

    Parameters
    ----------
    family : KernelFamily
        Its `emitter` makes its kernels.

    Raises
    ------
    TilePlanError
        If it is no `KernelFamily`, an attribute is of another kind than it says, or a name is
        taken.
    """
    if not isinstance(family, KernelFamily):
        raise TilePlanError(f"family is {shown(family)}, must be a KernelFamily")
    own = type(family).__name__
    check_attributes(family)
    for name in family.names:
        if name in _BY_NAME:
            other = type(_BY_NAME[name]).__name__
            raise TilePlanError(f"family {own}: {other} is called {name!r} as well")
    FAMILIES.insert(0, family)
    _BY_NAME.update(dict.fromkeys(family.names, family))
    for forget in ON_CHANGE:
        forget()


_LOADED: set[tuple[str, str]] = set()
_LOADING = RLock()


def _load_entry_points() -> None:
    """Register the families of other packages, each once."""
    with _LOADING:
        for point in _entry_points():
            if (point.name, point.value) in _LOADED:
                continue
            try:
                register_family(point.load()())
            except Exception as err:
                what = f"entry point {point.name!r} of {ENTRY_POINTS} is no family"
                raise TilePlanError(f"{what}: {type(err).__name__}: {err}") from err
            _LOADED.add((point.name, point.value))


@cache
def _entry_points() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINTS))


def families(problem: Problem[Any], backend: Backend = "auto") -> list[Family]:
    """Return the families that take such workloads on such a device."""
    _load_entry_points()
    return [
        family
        for family in FAMILIES
        if (backend != "tir" or family.language == "tir") and family.takes(problem)
    ]


def options(problem: Problem[Any], backend: Backend = "auto") -> Iterator[Option]:
    """Yield the plans that fit a problem, each once, with their families.

    A small part of all tilings, in the manner of MCFuser (SC'24), which prunes by deduplication,
    padding ratio and footprint.  Here duplicates never arise, because each dimension of the search
    is generated from what decides it; tiles that pad much are dropped where others pad less; and
    `violations` drops what does not fit.  Some hundred for a usual workload; none if not even the
    smallest tile fits.

    `backend`: which families are looked at: "tir", those whose kernels are TIR; "triton", the
    others, and those of TIR where no other has a plan.
    """
    left_out: set[type] = set()
    is_served = False
    known = families(problem, backend)
    is_last = {f: f.fallback or (backend, f.language) == ("triton", "tir") for f in known}
    for family in sorted(known, key=is_last.__getitem__):
        passed_over = type(family) in left_out or (is_served and is_last[family])
        if passed_over or _refused(family, problem) is not None:
            continue
        for offer in family.plans(problem):
            if next(family.violations(offer.plan, problem), None) is None:
                left_out.update(family.instead_of)
                is_served = is_served or (not is_last[family] and family.most_rows is None)
                yield Option(family, problem, offer)


def candidates(work: Workload, dev: DeviceSpec, backend: Backend = "auto") -> Iterator[TilePlan]:
    """Yield plans that fit `work` on `dev`: those of `options`."""
    return (option.plan for option in options(Problem(work, dev), backend))


def family_of(plan: TilePlan) -> Family:
    """Return the family that `plan` is of.

    Raises `TilePlanError` if there is none; the message has what there is.
    """
    return _named(plan.family)


def _named(name: str) -> Family:
    if name not in _BY_NAME:
        _load_entry_points()
    if name not in _BY_NAME:
        raise TilePlanError(f"family is {shown(name)}, there is {_listed(FAMILIES)}")
    return _BY_NAME[name]


def _listed(known: Iterable[Family]) -> str:
    return " and ".join(repr(name) for family in known for name in family.names)


def is_launched(plan: TilePlan) -> bool:
    """Tell whether a kernel is compiled by itself and launched, and is no scheduled TIR."""
    return family_of(plan).language != "tir"


def plan_of(attr: Mapping[str, Any]) -> TilePlan:
    """Read a plan from a dictionary, complaining about unknown and missing fields.

    `attr`: field names to values, as `TilePlan.to_attr` writes them.
    Raises `TilePlanError` if a field is unknown, lacks a value, or has a value that a plan cannot
    take.
    """
    if not isinstance(attr, Mapping):
        raise TilePlanError(f"tile plan is {shown(attr)}; must be a mapping")
    return read(_named(str(attr.get("family", ""))).plan, attr, TilePlanError, "tile plan")


def table_of(attr: Iterable[Mapping[str, Any]]) -> PlanTable:
    """Read a table from the form that `PlanTable.to_attr` writes.

    Raises `TilePlanError` if a plan is none, or the boxes do not end in an open one.
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
        entries.append((box, plan_of(own)))
    return PlanTable.of(entries)


def option_of(plan: TilePlan, problem: Problem[Any]) -> Option:
    """Return a user's plan with its family, whose type of plan it becomes.

    Raises `TilePlanError` if its family takes no such workloads on such a device, or the plan has a
    number that the family's plans lack.
    """
    family, known = family_of(plan), families(problem)
    if family not in known:
        there = f"there is {_listed(known)}" if known else "there is none"
        name, kind = type(problem.work).__name__, problem.dev.kind
        raise TilePlanError(f"family is {plan.family!r}, {there} for {name} on a {kind}")
    return Option(family, problem, Offer(family.plan.of(plan)))


def violations(
    plan: TilePlan, work: Workload, dev: DeviceSpec, most: int | None = None
) -> tuple[str, ...]:
    """Return why `plan` cannot run `work` on `dev`: one sentence each, with both numbers.

    This is the only statement of the constraint set: candidates are filtered by it and a user's
    own plan is refused by it.  Empty: the plan fits.

    Parameters
    ----------
    most : int, optional
        Rows, or query positions, up to which the plan serves; by default, what it can.
    """
    problem = Problem(work, dev, most)
    try:
        option = option_of(plan, problem)
    except TilePlanError as err:
        return (str(err),)
    family = option.family
    reason = _refused(family, problem)
    if reason is not None:
        return (reason,)
    if dev.kind == "gpu" and plan.num_warps == 0 and family.language == "tir":
        return (f"num_warps is 0, a kernel for the {dev.label} needs 1 or more",)
    return tuple(family.violations(option.plan, problem))


def refusals(problem: Problem[Any], backend: Backend = "auto") -> list[str]:
    """Return why there is no plan for a problem, each reason once."""
    nothing_fits = f"no tile of any family fits the {problem.dev.label}"
    known = families(problem, backend)
    return list(dict.fromkeys(_refused(f, problem) or nothing_fits for f in known))


def _refused(family: Family, problem: Problem[Any]) -> str | None:
    """Return why a family has no kernel for a problem: what no kernel of it does, or its own."""
    if problem.work.head_columns and not family.norms_heads:
        return "kernels of the family have no norm of heads behind a projection"
    return family.refuses(problem)


def footprint(work: Workload, plan: TilePlan, dev: DeviceSpec) -> Footprint:
    """Return what one task of `plan` occupies on `dev`."""
    return option_of(plan, Problem(work, dev)).price.foot


def predict(work: Workload, plan: TilePlan, dev: DeviceSpec, size: Size) -> Prediction:
    """Return what the fused kernel costs at `size`; only meaningful without `violations`.

    `size`: rows of a matmul workload; batch, query and key positions of an attention, where entries
    that the workload knows statically are ignored.
    """
    problem = Problem(work, dev)
    return option_of(plan, problem).price.at(problem.at(size))
