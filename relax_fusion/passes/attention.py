"""FuseAttentionChain: attention, as an operator or written out, becomes one kernel."""

from __future__ import annotations

from tvm import relax, tirx

from ..errors import Reason
from ..hardware.target import is_gpu
from ..matching.attention import AttentionChain, attention_chain
from ..matching.attention.aligned import Grid
from ..matching.attention.layout import Laid, laid
from ..matching.attention.modifiers import Modifiers, modifiers
from ..matching.attention.operands import read_by
from ..matching.constants import is_factor
from ..matching.pattern import BlockView, KernelArg, KernelOut, Match, PrimExpr, check_inner, guard
from ..matching.roundings import refuse_kept_roundings
from ..matching.shapes import as_dims, check_dtype, dtype_of, static
from ..transforms.modules import module_pass
from ..workload import Attention
from .driver import FusingPass


@module_pass
class FuseAttentionChain(FusingPass):
    """Fuse ``softmax(scale * q @ k^T + mask) @ v``.

    rewrite::

        k2 = R.repeat(R.strided_slice(cache_k, [1], [0], [n]), g, axis=2)    # both optional
        o  = R.nn.attention(q, k2, v2, scale=c, causal_mask="BottomRight")
            ->
        o  = R.call_tir(fuse_attention_chain_..., (q, cache_k, cache_v, n))

        s = R.add(R.multiply(R.matmul(q, R.permute_dims(k, [0, 1, 3, 2])), c), mask)
        o = R.matmul(R.nn.softmax(R.astype(s, "float32")), v)
            ->
        o = R.call_tir(fuse_attention_chain_..., (q, k, v, mask))

    Movements around the chain are absorbed: transposes and reshapes between ``[b, s, n, h]``,
    ``[b, n, s, h]``, ``[b * n, s, h]`` and ``[b, s, n * h]``, and heads of keys and values that are
    repeated or broadcast for several heads of queries.  Heads that are slices or parts of a split
    of a merged projection are read where they are, if one follows the other at equal steps.  On a
    CPU, so are the last features of keys where all heads share them (latent attention).

    A scale may stand at q, at k or at the scores; a soft-cap ``c * tanh(s / c)``, a bias (added, or
    by `minimum`), ALiBi and sinks are steps of the kernel.  A mask that depends on positions only,
    be it a constant, `tril` or a comparison of `arange`, becomes a causal mask and a window, and is
    not computed any more; one that compares positions of keys with a tensor, ``j < lengths[b]``,
    becomes a number of keys that the kernel reads.  Other booleans stay operands, as biases do.

    A query of which every key is hidden, by minus infinity, a boolean mask, or numbers below -1e30
    in masks by position or by booleans, gives zeros, where the graph gives NaN or the mean of some
    values.  Another number hides keys by position where it is proved that it leaves them no weight;
    else masks are added as the graph says, several as one operand.
    Zeros that a graph puts in the place of weights that are NaN are for such queries: of scores
    that are NaN, NaN stays.

    declines when:
        the softmax is not over the keys; scores or weights are read elsewhere; a mask stands in
        front of a soft-cap or a scale; a bias and a bound, or two masks of data, would be
        operands; scores are held back by a clamp, or replaced by a number, and may lie beyond; a
        mask differs between parts of a batch or of a head group; sinks or slopes of ALiBi are not
        by head; packed sequences have several lengths; a window has no causal mask; heads or
        features are dynamic; the mask is bottom-right causal and both lengths are static, with
        fewer keys than queries (front ends disagree on what that means); dtypes or virtual
        devices differ; scores or weights are rounded to fewer bits and widened again; the scores
        go through any other operator.

    Parameters
    ----------
    options : FuseOptions
        Target, plans, bounds of symbolic variables, and the list that receives decisions.
    """

    reads_results = True  # the movements that a projection leaves which rotates queries and keys

    def match(self, view: BlockView, var: relax.Var) -> Match | None:
        """Match the attention whose result `var` is."""
        chain = attention_chain(view, var)
        return self._build(view, chain) if chain is not None else None

    def _build(self, view: BlockView, chain: AttentionChain) -> Match:
        found = laid(view, chain, shares=not is_gpu(self.options.resolved_target()))
        sizes = (found.batch, found.q_heads, found.q_len, found.kv_len)
        # Reshapes of nothing do not tell which axis is which, and mean another size
        batch, q_len, kv_len = as_dims((found.batch, found.q_len, found.kv_len))
        guard(0 not in (batch, q_len), Reason.SHAPE, "there are no queries")
        guard(kv_len != 0, Reason.SHAPE, "there are no keys")
        mods = modifiers(chain, Grid(view, sizes))
        work = self._workload(chain, found, mods)
        args = {**found.args(), **mods.args()}
        if work.kv_prefix:
            args["kv_len"] = KernelArg(found.kv_len)
        out = found.out.at.expr
        inner = read_by(view, found.paths, chain.scores.covers)
        moved = (v for v in found.paths if v in inner)
        covers = tuple(dict.fromkeys((*moved, *chain.scores.covers, *found.out.path)))
        check_inner(view, covers, {out})
        refuse_kept_roundings(view, covers)
        shape = found.shape(found.out, found.q_heads, found.out_layout)
        outs = {"out": KernelOut(out, shape, work.out_dtype)}
        return Match.of(chain.spelling, covers, (args, outs), work)

    def _workload(self, chain: AttentionChain, found: Laid, mods: Modifiers) -> Attention:
        """Check dtypes and describe the attention."""
        prefix = found.k.length is not None
        names = _reserved_names(found.kv_len) if prefix else ()
        lengths = (found.batch, found.q_len, found.kv_len)
        batch, q_len, kv_len = as_dims(lengths, self.options.bounds, names)
        if mods.causal == "bottom_right" and isinstance(q_len, int) and isinstance(kv_len, int):
            detail = f"{q_len} queries over {kv_len} keys, bottom right"
            guard(q_len <= kv_len, Reason.SHAPE, detail)
        softcap, (q_in, k_in, v_in) = chain.scores.softcap, found.parts
        return Attention(
            batch=batch,
            q_len=q_len,
            kv_len=kv_len,
            q_heads=found.q_heads,
            kv_heads=found.kv_heads,
            head_dim=static(found.q.width, "the head dimension"),
            v_dim=static(found.v.width, "the value dimension"),
            scale=_factor(chain.scores.scale * found.factor, "scale"),
            causal=mods.causal,
            bias_dims=None if mods.bias is None else mods.bias[1],
            dtype=check_dtype(found.q.dtype, "the query"),
            out_dtype=check_dtype(found.out.dtype, "the result"),
            q_layout=found.q_layout,
            kv_layout=found.kv_layout,
            out_layout=found.out_layout,
            kv_prefix=prefix,
            bias_dtype=mods.bias_dtype,
            bias_op=mods.bias_op,
            mask_dims=None if mods.mask is None else mods.mask[1],
            window=mods.window,
            softcap=None if softcap is None else _factor(softcap, "soft-cap"),
            alibi=None if mods.slopes is None else dtype_of(mods.slopes.expr),
            sinks=None if mods.sinks is None else dtype_of(mods.sinks.expr),
            lengths=None if mods.lengths is None else mods.lengths[1],
            q_in=q_in,
            k_in=k_in,
            v_in=v_in,
            shared=0 if found.shared is None else static(found.shared.width, "what heads share"),
        )


def _factor(value: float, what: str) -> float:
    """Return a factor of the scores, refusing one that kernels do not have."""
    detail = f"a {what} of {value:g}; needs a normal number of float32"
    guard(is_factor(value), Reason.ATTRIBUTE, detail)
    return value


def _reserved_names(kv_len: PrimExpr | int) -> tuple[str, ...]:
    """Return the names of sizes that the kernel of a cache's prefix has beside the workload's."""
    static_length = isinstance(kv_len, int | tirx.IntImm)
    return ("kv_capacity", "kv_len") if static_length else ("kv_capacity",)
