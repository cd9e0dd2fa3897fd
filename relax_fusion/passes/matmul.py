"""FuseMatmulEpilogue: a matmul takes its bias, activation and residual along."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from ..errors import Reason
from ..estimator.families.cpu_dots import dot_families
from ..hardware.target import device_of, is_cpu
from ..matching.epilogue import FusedProjection
from ..matching.linear import Linear, linear
from ..matching.operations import KINDS, MOVES
from ..matching.pattern import BlockView, Match, guard
from ..matching.post_norms import built, sum_prologues
from ..matching.projections import Prologue, fused_projections, norm_matmuls
from ..matching.shapes import dtype_of
from ..transforms.modules import module_pass
from ..workload import INTEGER_DTYPES
from .driver import FusingPass


@module_pass
class FuseMatmulEpilogue(FusingPass):
    """Fuse the matmuls that no other pass took with the element-wise steps after them.

    These are the output and down projections of a transformer, and its lm_head.  A matmul with no
    step after it is taken too, so that every projection of a model is scheduled by our rules.

    rewrite::

        y = R.matmul(x, R.permute_dims(W)); z = R.add(r, R.add(y, b))
            ->
        z = R.call_tir(fuse_matmul_epilogue_..., (x, W, b, r))

    So is the sum of a norm and a residual that x is, as by `FuseProjections`.

    A rotation of heads (rope) is taken along as by `FuseRMSNormMatmul`.

    Where the back end has Triton, or the CPU an instruction that adds them up, products of int8 and
    uint8 are taken too, whose sums are int32, and with them a cast to float32 and steps of float32
    behind it.

    declines when:
        as `FuseRMSNormMatmul`, the norm aside.  Of integers: nothing adds them up; the sums are not
        int32; something element-wise follows that the kernel cannot take along, as the
        scales of rows: the rule for generic matmuls computes any such steps.

    Parameters
    ----------
    options : FuseOptions
        Target, plans, bounds of symbolic variables, and the list that receives decisions.
    """

    def match(self, view: BlockView, var: relax.Var) -> Sequence[Match] | None:
        """Match the projection that `var` is."""
        lin = linear(view, var)
        if lin is None:
            return None
        (chain,) = fused_projections(view, [lin], set(), self.options.bounds)
        found = sum_prologues(view, lin.x, {*lin.covers})
        if any(arg.expr.same_as(lin.x) for arg in chain.args):  # it is the residual behind, too
            found = found[-1:]
        return built(found, lambda before: self._build(view, lin, before))

    def _build(self, view: BlockView, lin: Linear, before: Prologue) -> list[Match]:
        """Describe the kernels of a projection, and of the steps behind it."""
        (chain,) = fused_projections(view, [lin], {*before.covers}, self.options.bounds)
        integers = dtype_of(lin.x) in INTEGER_DTYPES and self._adds_up(dtype_of(lin.x))
        if integers:
            _check_integers(view, chain)
        return norm_matmuls(view, before, [chain], self.options.bounds, integers)

    def _adds_up(self, dtype: str) -> bool:
        """Tell whether fused kernels add up products of such integers."""
        target = self.options.resolved_target()
        on_cpu = is_cpu(target) and any(dot_families(dtype, device_of(target)))
        return on_cpu or self.options.backend != "tir"


def _check_integers(view: BlockView, chain: FusedProjection) -> None:
    """Refuse sums that overflow, and results that the rule for generic matmuls goes on with."""
    sums = dtype_of(chain.linear.var)
    guard(sums == "int32", Reason.DTYPE, f"sums of integers are {sums}; needs int32")
    for user in view.uses(chain.out):
        value = view.defs[user]
        name = value.op.name if isinstance(value, relax.Call) and hasattr(value.op, "name") else ""
        moves = name in MOVES and name != "relax.astype"
        known = moves or KINDS.get(name) in ("matmul", "norm", "softmax", "attention")
        detail = f"{user.name} = {name or 'a call'} follows integers, which the rule takes along"
        guard(known, Reason.DTYPE, detail)
