"""FuseProjections: matmuls that read the same rows become one kernel."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import relax

from ..matching.linear import Linear, linear
from ..matching.operations import rotates
from ..matching.pattern import BlockView, Match, is_call
from ..matching.projections import fused_projections, norm_matmul, plain_prologue, readers_of
from .driver import FusingPass

_KERNELS = ("relax.call_tir", "relax.call_tir_inplace", "relax.matmul", "relax.nn.attention")
"""What reads the results of projections when all of those are there that it needs, if it does not
normalise and rotate those of one."""


@tvm.transform.module_pass(opt_level=0, name="FuseProjections")
class FuseProjections(FusingPass):
    """Fuse matmuls that read one tensor by weights of their own, with the steps after each.

    These are keys and values of cross attention, and projections whose norm stays apart.  Where
    Triton emits the kernels, up to three of them are one launch.

    rewrite::

        k = R.matmul(x, R.permute_dims(Wk)); v = R.add(R.matmul(x, R.permute_dims(Wv)), b)
            ->
        k, v = R.call_tir(fuse_projections_..., (x, Wk, Wv, b))

    A projection behind the first kernel that needs the result of one in front of it is not taken
    along: of all layers of a decoder that read one encoder, only those of one layer are.

    declines when:
        as `FuseMatmulEpilogue`, which then looks at each of them.

    Parameters
    ----------
    options : FuseOptions
        Target, plans, bounds of symbolic variables, and the list that receives decisions.
    """

    def match(self, view: BlockView, var: relax.Var) -> Match | None:
        """Match the projection that `var` is, with those of the same rows behind it."""
        first = linear(view, var)
        if first is None:
            return None
        together = [first, *_others(view, first)]
        if len(together) == 1:
            return None
        chains = fused_projections(view, together, set(), self.options.bounds)
        alike = [c for c in chains if c.out_dtype == chains[0].out_dtype]
        if len(alike) == 1:
            return None
        return norm_matmul(view, plain_prologue(first.x), alike, self.options.bounds)


def _others(view: BlockView, first: Linear) -> Iterator[Linear]:
    """Yield the projections of the same rows, up to the first kernel that needs `first`."""
    if not isinstance(first.x, relax.Var):
        return
    same = {hash(lin.var): lin for lin in readers_of(view, first.x) if lin.x.same_as(first.x)}
    needing = {*map(hash, view.uses(first.var))}
    for binding in view.bindings[view.index[first.var] + 1 :]:
        key = hash(binding.var)
        if key in needing:
            if is_call(binding.value, *_KERNELS) and not rotates(view, binding.value):
                return
            needing.update(map(hash, view.uses(binding.var)))
        elif key in same:
            yield same[key]
