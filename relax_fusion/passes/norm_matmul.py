"""FuseRMSNormMatmul: a norm and the matmuls that read it become one kernel."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from ..errors import Reason
from ..matching.norms import is_rounded_norm, normalisation
from ..matching.pattern import BlockView, Match, Refused
from ..matching.post_norms import built, prologues
from ..matching.projections import fused_projections, made_by, norm_matmuls, readers_of
from ..matching.shapes import dtype_of
from ..transforms.modules import module_pass
from .driver import FusingPass


@module_pass
class FuseRMSNormMatmul(FusingPass):
    """Fuse RMSNorm or LayerNorm with the projections of its result.

    rewrite::

        s  = R.add(x, r)                       # optional; returned if others read it
        h  = R.nn.rms_norm(s, g)               # or layer_norm, or rms_norm written out
        q  = R.matmul(h, R.permute_dims(Wq))   # one or more; Wq as [n, k] or [k, n]
        q1 = act(R.add(R.add(q, b), t))        # optional steps, in any order
            ->
        s, q1, ... = R.call_tir(fuse_rms_norm_matmul_..., (x, r, g, Wq, b, t, ...))

        s  = R.add(R.nn.rms_norm(x, g0), r)    # an RMSNorm behind a projection, Gemma's for one
            ->
        s, q1, ... = R.call_tir(fuse_rms_norm_matmul_..., (x, g0, r, g, Wq, b, t, ...))

        n  = R.nn.rms_norm(R.astype(s, "float32"), g1)   # g1 = R.add(R.astype(g, "float32"), 1)
        h  = R.astype(n, "float16")                      # in any of these, cast or not
            ->
        as above, of s and g: the kernel computes 1 + g in float32

        n  = R.nn.layer_norm(s, 1, 0)                    # adaLN: c and t have a row for each
        h  = R.add(R.multiply(n, R.add(c, 1)), t)        # sequence, [b, 1, k]
            ->
        as above, of s, c and t

        q2 = R.permute_dims(R.reshape(q, [b, s, heads, d]), [0, 2, 1, 3])   # or neither, or split
        y  = R.add(R.multiply(q2, cos), R.multiply(rotate_half(q2), sin))   # rope, behind a bias
            ->
        q1 = R.call_tir(fuse_rms_norm_matmul_..., (x, g, Wq, cos, sin, ...))
        y  = R.permute_dims(R.reshape(q1, [b, s, heads, d]), [0, 2, 1, 3])

    The first features of each head may be rotated alone, and put together with the others again;
    pairs may be neighbours; heads of queries, keys and values may come in turns, as in
    ``R.split(R.reshape(qkv, [b, s, heads, 3 * d]), 3, axis=-1)``; angles may be one for each pair.

    An RMSNorm of heads, or of whole rows, in front of the rotation is taken along on CPUs, where
    `FuseNormRotation` has made one PrimFunc of both.

    Heads stay unrotated, and the report says why, when:
        an unrotated one is read elsewhere; angles differ between heads, or are the same along a
        later dimension of the rows than they differ in; the rotated heads are not the first ones of
        the projection or of each turn, or do not divide into what is rotated of them; parts of a
        projection turn by different angles, or are normalised by different weights; an activation
        or a residual comes before; the result has another dtype than the matmul.

    declines when:
        the norm is not over the last axis; an intermediate that no kernel can return is read
        elsewhere; the weight's input features are dynamic; operands differ in dtype (as a gamma of
        float32 and rows of float16 do, or rows of float32 and a weight of float16), or it is none
        of float16, bfloat16, float32; tensors are on several virtual devices, or on one of another
        kind than the target; the chain is outside a dataflow block; the estimator predicts no gain
        or finds no plan that fits.

    Parameters
    ----------
    options : FuseOptions
        Target, plans, bounds of symbolic variables, and the list that receives decisions.
    """

    def match(self, view: BlockView, var: relax.Var) -> Sequence[Match] | None:
        """Match the norm that `var` is, with everything that reads it through a matmul."""
        normed = normalisation(view, var)
        linears = readers_of(view, var) if normed is not None else []
        if normed is None and is_rounded_norm(view, var) and readers_of(view, var):
            detail = f"a norm of float32 rows, rounded to {dtype_of(var)} for a matmul"
            raise Refused(Reason.DTYPE, f"{detail}; a kernel has rows and weights of one dtype")
        if normed is None or not linears:
            return None
        chains = fused_projections(view, linears, made_by(view, normed), self.options.bounds)
        found = prologues(view, normed, {v for lin in linears for v in lin.covers})
        return built(found, lambda before: norm_matmuls(view, before, chains, self.options.bounds))
