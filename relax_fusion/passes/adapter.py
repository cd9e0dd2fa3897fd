"""FuseAdapters: projections take the adapters beside their weights along."""

from __future__ import annotations

from tvm import relax

from ..matching.adapter import adapted
from ..matching.epilogue import FusedProjection
from ..matching.linear import Linear, linear
from ..matching.norms import normalisation
from ..matching.pattern import BlockView, Match, Refused
from ..matching.projections import made_by, norm_matmul, norm_prologue, plain_prologue, readers_of
from ..transforms.modules import module_pass
from .driver import FusingPass


@module_pass
class FuseAdapters(FusingPass):
    """Fuse projections with the adapters of low rank that are added to them.

    These are layers with LoRA (Hu et al., 2021, https://arxiv.org/abs/2106.09685), as peft leaves
    them: a narrow launch makes ``s x A``, and that of ``x W`` goes on with its product by B in the
    same sums.

    rewrite::

        y = R.add(R.matmul(x, R.permute_dims(W)), b)    # a bias or none
        l = R.matmul(R.matmul(x, R.permute_dims(A)), R.permute_dims(B))
        z = R.add(y, R.multiply(l, R.const(2.0)))       # in any order, the factor behind A or B
        o = act(R.add(z, t))                            # optional steps, as of FuseMatmulEpilogue
            ->
        o = R.call_tir(fuse_adapters_..., (x, W, A, B, b, t))

        h = R.nn.rms_norm(x, g)                         # or layer_norm, with all that have adapters
            ->                                          # of what reads it; others read h
        h, q, v = R.call_tir(fuse_adapters_..., (x, g, Wq, Aq, Bq, Wv, Av, Bv))

    declines when:
        the adapter's rank or the weight's features are no multiple of 8, or not known; a weight is
        packed; B lies otherwise than the weight; a number behind B is no power of two, which could
        not be multiplied in front of a rounding; what is between is read elsewhere; the device is
        none of Hopper, or Triton does not emit the kernels; the estimator predicts no gain.  The
        other passes look at the parts then.

    Parameters
    ----------
    options : FuseOptions
        Target, plans, bounds of symbolic variables, and the list that receives decisions.
    """

    def match(self, view: BlockView, var: relax.Var) -> Match | None:
        """Match the norm that `var` is with all of its matmuls, or the projection that it is."""
        try:
            normed = normalisation(view, var)
            lin = linear(view, var) if normed is None else None
            linears = readers_of(view, var) if normed is not None else []
        except Refused:
            return None  # a later pass says why
        if normed is None:
            chain = adapted(view, lin, set()) if lin is not None else None
            if lin is None or chain is None:
                return None
            return norm_matmul(view, plain_prologue(lin.x), [chain], self.options.bounds)
        chains = _chains(view, linears, made_by(view, normed))
        if not chains:
            return None
        before = norm_prologue(view, normed, {v for chain in chains for v in chain.covers})
        return norm_matmul(view, before, chains, self.options.bounds)


def _chains(view: BlockView, linears: list[Linear], made: set[relax.Var]) -> list[FusedProjection]:
    """Return the projections of the same rows that have adapters."""
    chains: list[FusedProjection] = []
    inside = set(made)
    for lin in linears:
        chain = adapted(view, lin, inside)
        if chain is not None:
            chains.append(chain)
            inside |= set(chain.covers)
    return chains
