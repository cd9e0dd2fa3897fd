"""Which launches compute a matmul by experts under a plan.

A plan of the family "expert_pairs" computes one pair of token and expert after the other.  One of
"expert_tiles" reads pairs in the order of their experts, which a launch in front has found for all
products by the same choice (`order_steps`), and has one behind where the results of a token's pairs
are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tvm import tirx

from ..errors import LoweringError
from ..estimator.families.triton_experts import PAIRS, TILES, ExpertPlan
from ..hardware import DeviceSpec
from ..launch.arguments import TensorMap, Workspace
from ..workload import DynamicDim, ExpertMatmul
from .kernel import KernelOptions
from .kernels.expert_counts import bins_of, expert_counts
from .kernels.expert_order import expert_order
from .kernels.expert_pairs import expert_pairs
from .kernels.expert_sum import expert_sum
from .kernels.expert_tiles import expert_tiles
from .kernels.experts import ExpertForm, ExpertTensors, ExpertTile
from .launches import GROUP_M, NOTHING_FIXED, FixedWeights, Step, ceil_div, fewer
from .operands import words_of

ORDER_CHUNK, ORDER_BLOCK = 256, 1024
"""Pairs of a program of `expert_order`, and how many each counts for itself."""

SUM_COLUMNS = 1024
"""Columns of a program of `expert_sum`."""

SWAP_ROWS = 64
"""With fewer rows, the weight is the left operand of the tensor cores, whose least height is 64."""


class ExpertOrder(NamedTuple):
    """What `expert_order` finds, as arguments of kernels."""

    order: Any
    """The pairs, those of the first expert first: int32 ``[pairs]``."""
    begins: Any
    """The place of the first pair of each expert, and their number: int32 ``[experts + 1]``."""


def order_steps(
    ids: Any, found: ExpertOrder, experts: int, most_pairs: int | None, dependent: bool
) -> list[Step]:
    """Return the launches that sort pairs by their experts.

    `ids` is ``[tokens, chosen]``; of pairs there are `most_pairs` at most, if that is known.
    `dependent`: whether a launch may overlap the end of the one before it.
    """
    tokens, chosen = ids.ty.shape.values
    pairs = tokens * chosen
    pairs = int(pairs) if isinstance(pairs, tirx.IntImm) else pairs
    chunks = ceil_div(pairs, ORDER_CHUNK)
    few = most_pairs is not None and most_pairs <= ORDER_BLOCK
    counts = None if few else Workspace((chunks * bins_of(experts),), "int32")
    same = {"EXPERTS": experts, "CHUNK": ORDER_CHUNK, "PDL": dependent}
    options = KernelOptions(num_warps=8, num_stages=1, dependent_launch=dependent)
    given = {"ids_ptr": ids, "counts_ptr": counts, "pairs": as_int32(pairs)}
    counted = Step(expert_counts, (chunks,), given, same, options)
    given |= {"order_ptr": found.order, "begins_ptr": found.begins}
    ordered = Step(expert_order, (chunks,), given, {**same, "BLOCK": ORDER_BLOCK}, options)
    return [ordered] if few else [counted, ordered]


def expert_steps(
    work: ExpertMatmul,
    plan: ExpertPlan,
    given: Mapping[str, Any],
    most_rows: int | None,
    dev: DeviceSpec,
    workspaces: dict[str, Workspace],
    fixed: FixedWeights = NOTHING_FIXED,
) -> list[Step]:
    """Return the launches that compute `work`, in order.

    `given` has the operands of ``work.graph``, and those of `ExpertOrder` for "expert_tiles";
    `fixed` tells which of them may be read early.  The plan serves up to `most_rows` rows.
    `workspaces` gets the workspaces, for the plans of other ranges to use the same.
    """
    names = {"w": "w0", "bias": "bias0", "out": "out0", "scale": "w0_scale"}
    tensors = {n: given.get(names.get(n, n)) for n in ExpertTensors._fields}
    rows = given["x"].ty.shape.values[0]
    rows = rows if isinstance(work.rows, DynamicDim) else int(rows)
    dependent = dev.capabilities.dependent_launch
    weights = [w for w in (tensors["w"], tensors["scale"]) if w is not None]
    early = dependent and not fixed.leads and _among(weights, fixed.inputs)
    early = early and _among([tensors["ids"]], fixed.settled)
    order = ExpertOrder(given["order"], given["begins"]) if "order" in given else None
    of = _form(work), ExpertTensors(**tensors), rows, work.out_dtype
    return ExpertCall(*of, dependent, early, order).steps(plan, workspaces, most_rows)


def _among(some: Sequence[Any], every: Sequence[Any]) -> bool:
    return all(any(one is other for other in every) for one in some)


def _form(work: ExpertMatmul) -> ExpertForm:
    gate = work.gate
    form = ExpertForm(work.experts, work.chosen, work.n, work.k, work.layout, work.each)
    form = form._replace(**words_of(work.packed))
    if gate is None:
        return form._replace(activation=work.activation or "none")
    return form._replace(
        gate="pairs" if gate.interleaved else "halves",
        gate_first=gate.gate_first,
        activation=gate.activation,
        sharpness=gate.sharpness,
        gate_bounds=gate.gate_bounds,
        up_bounds=gate.up_bounds,
        offset=gate.offset,
    )


@dataclass(frozen=True)
class ExpertCall:
    """A matmul by experts: its form, its tensors, and the dtype of its result."""

    form: ExpertForm  # what is known when kernels are compiled
    tensors: ExpertTensors  # arguments of a kernel; those of a share are added by token
    tokens: Any  # how many tokens there are
    out_dtype: str  # a dtype of TVM
    dependent: bool  # whether launches may overlap the end of the one before them
    early: bool = False  # whether weights and numbers of experts may be read by then
    order: ExpertOrder | None = None  # what "expert_tiles" reads

    def steps(
        self, plan: ExpertPlan, workspaces: dict[str, Workspace], most: int | None
    ) -> list[Step]:
        """Return the launches of a plan that serves up to `most` tokens, in order.

        `workspaces` gets the workspaces, for the plans of other ranges to use the same.

        Raises `LoweringError` if the plan is of another family.
        """
        if plan.family == PAIRS:
            return [self._pairs(plan)]
        if plan.family == TILES:
            return self._tiles(plan, workspaces, most)
        raise LoweringError(f"plan {plan.key}: no kernel family {plan.family!r}")

    @property
    def _pairs_count(self) -> Any:
        return self.tokens * self.form.chosen

    def _tile(self, plan: ExpertPlan, **others: Any) -> ExpertTile:
        return ExpertTile(plan.block_n, plan.block_k, plan.num_stages, self.dependent, **others)

    def _options(self, warps: int, stages: int = 1) -> KernelOptions:
        return KernelOptions(num_warps=warps, num_stages=stages, dependent_launch=self.dependent)

    def _columns(self, plan: ExpertPlan) -> int:
        """Return the tiles of columns."""
        wide = 2 * self.form.n if self.form.gate == "pairs" else self.form.n
        return -(-wide // plan.block_n)

    def _pairs(self, plan: ExpertPlan) -> Step:
        rows = self._pairs_count if self.tensors.share is None else self.tokens
        constants = {"F": self.form, "C": self._tile(plan, early=self.early, unroll=plan.unroll)}
        options = self._options(plan.num_warps, plan.num_stages)
        grid = (rows, self._columns(plan))
        return Step(expert_pairs, grid, {"p": self.tensors}, constants, options)

    def _tiles(
        self, plan: ExpertPlan, workspaces: dict[str, Workspace], most: int | None
    ) -> list[Step]:
        form, block_m, order = self.form, plan.block_m, self.order
        assert order is not None, plan
        pairs = self._pairs_count
        held = fewer(self.tokens, most) * form.chosen
        tiles = most_tiles(pairs, form.experts, block_m)

        def room(name: str, shape: tuple[Any, ...], dtype: str) -> Workspace:
            return workspaces.setdefault(f"{name} {shape} {dtype}", Workspace(shape, dtype))

        added = self.tensors.share is not None
        parts = room("parts", (held, form.n), self.out_dtype) if added else self.tensors.out
        swap = block_m < SWAP_ROWS
        tile = self._tile(plan, block_m=block_m, swap=swap, group_m=GROUP_M)
        given = {
            "p": self.tensors._replace(residual=None, ids=None, out=parts),
            "order_ptr": order.order,
            "begins_ptr": order.begins,
            "tiles": as_int32(tiles),
        }
        if plan.tensor_map:
            box = (plan.block_n, plan.block_k)
            given["w_map"] = TensorMap(self.tensors.w, box if form.layout == "nk" else box[::-1])
        options = self._options(plan.num_warps, plan.num_stages)
        grid = (tiles * self._columns(plan),)
        product = Step(expert_tiles, grid, given, {"F": form, "C": tile}, options)
        return [product, *([self._sum(parts)] if added else [])]

    def _sum(self, parts: Any) -> Step:
        n = self.form.n
        given = {
            "parts_ptr": parts,
            "residual_ptr": self.tensors.residual,
            "out_ptr": self.tensors.out,
        }
        constants = {
            "CHOSEN": self.form.chosen,
            "N": n,
            "BLOCK": min(SUM_COLUMNS, 1 << (n - 1).bit_length()),
            "PDL": self.dependent,
        }
        grid = (self.tokens, -(-n // constants["BLOCK"]))
        return Step(expert_sum, grid, given, constants, self._options(4))


def most_tiles(pairs: Any, experts: int, block_m: int) -> Any:
    """Return how many tiles there is room for: each expert may have one that is not full."""
    return pairs // block_m + experts


def as_int32(number: Any) -> Any:
    """Return a number as a kernel's argument."""
    return number if isinstance(number, int) else tirx.Cast("int32", number)
