"""FuseAttentionChain: attention, as an operator or written out, becomes one kernel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import tvm
from tvm import ir, relax

from ..chains.attention import AttentionChain, attention_chain
from ..chains.attention_operands import (
    HEAD_AXIS,
    SEQUENCE_AXIS,
    Operand,
    check_operand_shapes,
    four_shape,
    key_value,
    mask_dims,
    mask_shape,
    reserved_names,
    result_transpose,
    through_transpose,
)
from ..errors import Reason
from ..lowering import FuseOptions, fuse
from ..pattern import BlockView, KernelArg, KernelOut, Match, PrimExpr, check_inner, guard
from ..shapes import as_dims, check_dtype, check_vdevices, dtype_of, static
from ..workload import Attention

PATTERN = "FuseAttentionChain"


@tvm.transform.module_pass(opt_level=0, name=PATTERN)
@dataclass(frozen=True)
class FuseAttentionChain:
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

    Transposes between ``[b, s, n, h]`` and ``[b, n, s, h]`` around the chain are absorbed.  Rows
    that see no key come out as zeros.

    declines when:
        the softmax is not over the last axis; scores are read elsewhere; heads of k and v do not
        divide those of q; heads or features are dynamic; a window is asked for; the mask does not
        broadcast to ``[b, n, s_q, s_k]``; the mask is bottom-right causal and both lengths are
        static, with fewer keys than queries (front ends disagree on what that means); dtypes or
        virtual devices differ.

    Parameters
    ----------
    options : FuseOptions
        Target, plans, bounds of symbolic variables, and the list that receives decisions.
    """

    options: FuseOptions = field(default_factory=FuseOptions)

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite every function of `mod`."""
        return fuse(mod, PATTERN, self.match, self.options)

    def match(self, view: BlockView, var: relax.Var) -> Match | None:
        """Match the attention whose result `var` is."""
        chain = attention_chain(view, var)
        return self._build(view, var, chain) if chain is not None else None

    def _build(self, view: BlockView, var: relax.Var, chain: AttentionChain) -> Match:
        q = through_transpose(view, Operand(chain.q, chain.layout))
        k, v = key_value(view, chain)
        work, kv_len = self._workload(view, chain, (q, k, v), var)
        args = [KernelArg(o.expr, four_shape(o.expr)) for o in (q, k, v)]
        if chain.bias is not None:
            args.append(KernelArg(chain.bias, mask_shape(chain.bias, chain.rank)))
        covers = (*q.covers, *k.covers, *v.covers, *chain.covers)
        tensors = [a.expr for a in args]
        if work.kv_prefix:
            args.append(KernelArg(kv_len))
        check_vdevices(tensors)
        out, out_layout, out_covers = result_transpose(view, var, chain.layout)
        work = replace(work, out_layout=out_layout)
        covers = tuple(dict.fromkeys((*covers, *out_covers)))
        check_inner(view, covers, {out})
        shape = tuple(four_shape(out))
        outs = (KernelOut(out, shape, work.out_dtype),)
        return Match(PATTERN, chain.spelling, covers, tuple(args), outs, work)

    def _workload(
        self,
        view: BlockView,
        chain: AttentionChain,
        operands: tuple[Operand, Operand, Operand],
        var: relax.Var,
    ) -> tuple[Attention, PrimExpr]:
        """Check sizes and dtypes and describe the attention."""
        q, k, v = operands
        dtype = check_dtype(dtype_of(q.expr), "the query")
        for name, operand in (("key", k), ("value", v)):
            got = dtype_of(operand.expr)
            guard(got == dtype, Reason.DTYPE, f"the {name} is {got}, the query {dtype}")
        check_operand_shapes(chain, operands)
        qs, ks, vs = (four_shape(o.expr) for o in operands)
        batch, q_len = qs[0], qs[SEQUENCE_AXIS[q.layout]]
        heads = static(qs[HEAD_AXIS[q.layout]], "the number of query heads")
        kv_heads = static(ks[HEAD_AXIS[k.layout]], "the number of key heads")
        guard(
            heads == kv_heads * k.groups,
            Reason.SHAPE,
            f"{heads} query heads over {kv_heads} key heads repeated {k.groups} times",
        )
        kv_len = k.length if k.length is not None else ks[SEQUENCE_AXIS[k.layout]]
        names = reserved_names(kv_len) if k.length is not None else ()
        batch_dim, q_dim, kv_dim = as_dims((batch, q_len, kv_len), self.options.bounds, names)
        if chain.causal == "bottom_right" and isinstance(q_dim, int) and isinstance(kv_dim, int):
            detail = f"{q_dim} queries over {kv_dim} keys, bottom right"
            guard(q_dim <= kv_dim, Reason.SHAPE, detail)
        bias = chain.bias
        work = Attention(
            batch=batch_dim,
            q_len=q_dim,
            kv_len=kv_dim,
            q_heads=heads,
            kv_heads=kv_heads,
            head_dim=static(qs[3], "the head dimension"),
            v_dim=static(vs[3], "the value dimension"),
            scale=chain.scale,
            causal=chain.causal,
            bias_dims=mask_dims(chain, (batch, heads, q_len, kv_len)),
            dtype=dtype,
            out_dtype=check_dtype(dtype_of(var), "the result"),
            q_layout=q.layout,
            kv_layout=k.layout,
            kv_prefix=k.length is not None,
            bias_dtype="float32" if bias is None else check_dtype(dtype_of(bias), "the mask"),
        )
        return work, kv_len
