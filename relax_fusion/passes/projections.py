"""FuseProjections: matmuls that read the same rows become one kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvm import relax

from ..matching.epilogue import FusedProjection
from ..matching.linear import Linear, linear
from ..matching.norm_rotation import norm_rotation_of
from ..matching.pattern import BlockView, Match, is_call
from ..matching.post_norms import built, sum_prologues
from ..matching.projections import Prologue, fused_projections, norm_matmuls, readers_of
from ..transforms.modules import module_pass
from .driver import FusingPass

_KERNELS = ("relax.call_tir", "relax.call_tir_inplace", "relax.matmul", "relax.nn.attention")
"""What reads the results of projections when all of those are there that it needs, if it does not
normalise and rotate those of one."""


@module_pass
class FuseProjections(FusingPass):
    """Fuse matmuls that read one tensor by weights of their own, with the steps after each.

    These are keys and values of cross attention, and projections whose norm stays apart.  Where
    Triton emits the kernels, up to three of them are one launch.

    rewrite::

        k = R.matmul(x, R.permute_dims(Wk)); v = R.add(R.matmul(x, R.permute_dims(Wv)), b)
            ->
        k, v = R.call_tir(fuse_projections_..., (x, Wk, Wv, b))

        x = R.add(R.nn.rms_norm(y, g), r)      # a sum of a norm, returned if others read it
            ->
        x, k, v = R.call_tir(fuse_projections_..., (y, g, r, Wk, Wv, b))

    A projection behind the first kernel that needs the result of one in front of it is not taken
    along: of all layers of a decoder that read one encoder, only those of one layer are.

    declines when:
        as `FuseMatmulEpilogue`, which then looks at each of them.

    Parameters
    ----------
    options : FuseOptions
        Target, plans, bounds of symbolic variables, and the list that receives decisions.
    """

    def match(self, view: BlockView, var: relax.Var) -> Sequence[Match] | None:
        """Match the projection that `var` is, with those of the same rows behind it."""
        first = linear(view, var)
        if first is None:
            return None
        together = [first, *_others(view, first)]
        if len(together) == 1:
            return None
        if len(self._alike(view, together, set())) == 1:
            return None
        return built(
            sum_prologues(view, first.x, {v for lin in together for v in lin.covers}),
            lambda before: self._build(view, together, before),
        )

    def _build(self, view: BlockView, together: list[Linear], before: Prologue) -> list[Match]:
        chains = self._alike(view, together, {*before.covers})
        return norm_matmuls(view, before, chains, self.options.bounds)

    def _alike(
        self, view: BlockView, together: list[Linear], made: set[relax.Var]
    ) -> list[FusedProjection]:
        """Return the projections whose results have the dtype of the first."""
        chains = fused_projections(view, together, made, self.options.bounds)
        return [c for c in chains if c.out_dtype == chains[0].out_dtype]


def _others(view: BlockView, first: Linear) -> Iterator[Linear]:
    """Yield the projections of the same rows, up to the first kernel that needs `first`."""
    if not isinstance(first.x, relax.Var):
        return
    same = {hash(lin.var): lin for lin in readers_of(view, first.x) if lin.x.same_as(first.x)}
    needing = {*map(hash, view.uses(first.var))}
    for binding in view.bindings[view.index[first.var] + 1 :]:
        key = hash(binding.var)
        if key in needing:
            if (
                is_call(binding.value, *_KERNELS)
                and norm_rotation_of(view.mod, binding.value) is None
            ):
                return
            needing.update(map(hash, view.uses(binding.var)))
        elif key in same:
            yield same[key]
