"""FuseMatmulEpilogue: a matmul takes its bias, activation and residual along."""

from __future__ import annotations

import tvm
from tvm import relax

from ..matching import epilogue, linear, norm_matmul, plain_prologue, with_rope
from ..matching.pattern import BlockView, Match
from .driver import FusingPass


@tvm.transform.module_pass(opt_level=0, name="FuseMatmulEpilogue")
class FuseMatmulEpilogue(FusingPass):
    """Fuse the matmuls that no other pass took with the element-wise steps after them.

    These are the output and down projections of a transformer, and its lm_head.  A matmul with no
    step after it is taken too, so that every projection of a model is scheduled by our rules.

    rewrite::

        y = R.matmul(x, R.permute_dims(W)); z = R.add(r, R.add(y, b))
            ->
        z = R.call_tir(fuse_matmul_epilogue_..., (x, W, b, r))

    A rotation of heads (rope) is taken along as by `FuseRMSNormMatmul`.

    declines when:
        as `FuseRMSNormMatmul`, the norm aside.

    Parameters
    ----------
    options : FuseOptions
        Target, plans, bounds of symbolic variables, and the list that receives decisions.
    """

    def match(self, view: BlockView, var: relax.Var) -> Match | None:
        """Match the projection that `var` is."""
        lin = linear(view, var)
        if lin is None:
            return None
        chain = with_rope(view, epilogue(view, lin, set()), set(), self.options.bounds)
        return norm_matmul(view, plain_prologue(lin.x), [chain], self.options.bounds)
