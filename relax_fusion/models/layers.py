"""Layers that the models share, and those whose weights are stored quantised.

A quantised weight is decoded by a PrimFunc wherever it is read, as MLC-LLM writes it: matmuls and
lookups take that in, and no weight is written to memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op
from tvm.relax.frontend.nn.core import wrap_nested

from ..compute.packed import unpacked
from ..quantization import Quantization
from ..workload import Packed
from .cuts import Cut

DTYPES = ("float32", "float16", "bfloat16")
"""Element types that a model can be exported with."""


_GELU_TANH = partial(op.gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": op.silu,
    "relu": op.relu,
    "gelu": op.gelu,
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
}


def activation(name: str, x: Tensor) -> Tensor:
    """Apply the activation that a Hugging Face config calls ``name``."""
    return _ACTIVATIONS[name](x)


class Embedding(nn.Embedding):
    """A table of rows by token id; an id outside of it reads the nearest row.

    TVM's own layer takes rows without a bounds check, and a wrong id crashes the process.
    """

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ``[batch, seq_len]`` ids: ``[batch, seq_len, width]``."""
        rows = relax.op.take(self.weight._expr, ids._expr, axis=0, mode="clip")
        return wrap_nested(rows, "take")


def slice_rows(x: Tensor, axis: int, begin: tirx.Expr | int, end: tirx.Expr | int) -> Tensor:
    """``x[..., begin:end, ...]`` along ``axis``; the caller knows that the range is in bounds."""
    # Without assume_inbound the inferred extent is a min/max expression instead of end - begin.
    sliced = relax.op.strided_slice(
        x._expr, axes=[axis], begin=[begin], end=[end], assume_inbound=True
    )
    return wrap_nested(sliced, "slice")


def last_position(x: Tensor) -> Tensor:
    """``[batch, seq_len, width]`` to ``[batch, 1, width]``, dropping all but the last token."""
    seq_len = x.shape[1]
    if isinstance(seq_len, int) and seq_len == 1:
        return x
    return slice_rows(x, 1, seq_len - 1, seq_len)


class OffsetRMSNorm(nn.Module):
    """RMSNorm by a weight that is kept less 1."""

    def __init__(self, width: int, eps: float) -> None:
        self.weight = nn.Parameter((width,))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis in float32, where 1 and a small rest have a sum, rounded once."""
        gamma = in_float32(self.weight) + 1.0
        wide = op.rms_norm(in_float32(x), gamma, axes=[-1], epsilon=self.eps)
        return wide if x.dtype == "float32" else op.astype(wide, x.dtype)


def in_float32(x: Tensor) -> Tensor:
    """Cast to float32 what is of another type."""
    return x if x.dtype == "float32" else op.astype(x, "float32")


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``: about x where it is small, and never beyond the cap."""
    return op.tanh(x / cap) * cap


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    seen: Tensor,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention step by step; shapes as of `attention`.

    `seen` tells which keys each query sees, boolean ``[seq_len, context]``; scores are soft-capped
    if there is a `cap`; `sinks` have one score more for each head, ``[heads]``.
    """
    batch, seq_len, heads, _ = q.shape
    group = heads // k.shape[2]
    if group > 1:
        k, v = op.repeat(k, group, axis=2), op.repeat(v, group, axis=2)
    q, v = (op.permute_dims(x, [0, 2, 1, 3]) for x in (q, v))
    scores = op.matmul(q, op.permute_dims(k, [0, 2, 3, 1])) * scale
    scores = scores if cap is None else soft_capped(scores, cap)
    scores = op.where(seen, scores, wrap_nested(relax.const(float("-inf"), q.dtype), "lowest"))
    if sinks is not None:
        column = op.broadcast_to(op.reshape(sinks, (1, heads, 1, 1)), (batch, heads, seq_len, 1))
        scores = op.concat([scores, column], dim=-1)
    weights = op.astype(op.softmax(in_float32(scores), axis=-1), q.dtype)
    if sinks is not None:
        weights = slice_rows(weights, 3, 0, k.shape[1])
    mixed = op.permute_dims(op.matmul(weights, v), [0, 2, 1, 3])
    return op.reshape(mixed, (batch, seq_len, heads * v.shape[3]))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Scaled dot-product attention ``[batch, seq_len, heads * dim]``; causal without a ``bias``.

    `q`: ``[batch, seq_len, heads, dim]``.
    `k`, `v`: ``[batch, context, kv_heads, dim]``; heads are repeated to match ``q``.
    `scale`: factor on the scores.
    `bias`: ``[batch, 1, 1, context]``, added to the scores of an encoder.
    `window`: how many keys each query sees, itself included; all before it by default.
    """
    batch, seq_len, heads, _ = q.shape
    group = heads // k.shape[2]
    if group > 1:
        k, v = op.repeat(k, group, axis=2), op.repeat(v, group, axis=2)
    call = relax.op.nn.attention(
        q._expr,
        k._expr,
        v._expr,
        bias=None if bias is None else bias._expr,
        # TVM multiplies scores by this immediate as it is: a float32 one would promote float16
        # scores, and the matmul that follows would then have two operand types.
        scale=tirx.FloatImm(str(q.dtype), scale),
        # The last query sees the whole context, however much of it was cached before.
        causal_mask="BottomRight" if bias is None else None,
        window_size=window,
    )
    return op.reshape(wrap_nested(call, "attention"), (batch, seq_len, heads * v.shape[3]))


def project_to_vocabulary(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by an embedding matrix ``[vocab, width]`` transposed; float32 logits."""
    return op.matmul(x, op.permute_dims(weight), out_dtype="float32")


@dataclass(frozen=True)
class Recipe:
    """Source of one parameter."""

    names: tuple[str, ...] = ()
    """Checkpoint tensors, concatenated along axis 0."""
    rows: tuple[int, ...] = ()
    """Rows of each, where there are several."""
    spans: tuple[tuple[int, int, int] | None, ...] = ()
    """Which part of each is taken, where there are parts: an axis, where it begins and ends."""
    transpose: bool = False
    """Whether each tensor is stored ``[in, out]`` (GPT-2's Conv1D) and must be transposed."""
    stored: tuple[int, ...] | None = None
    """The shape of the one tensor in a checkpoint, where `arrange` makes the parameter of it."""
    arrange: Callable[[np.ndarray], np.ndarray] | None = None
    compute: Callable[[], np.ndarray] | None = None
    """Makes a parameter that no checkpoint holds; ``names`` is then empty."""
    cut: Cut | None = None
    """How it is spread over workers, where it is."""


class ExpertLinear(nn.Linear):
    """The weights of experts, one after the other as rows of one matrix."""


class Router(nn.Linear):
    """What scores experts, which is never quantised: others would be chosen."""


FORM, WHOLE = "form", "whole"
"""Attributes of the parameters: the format, and the shape of the weight as a checkpoint has it."""


class _Quantized(nn.Module):
    """A layer with words and scales in the place of its weight."""

    def __init__(self, layer: nn.Linear | nn.Embedding, form: Packed) -> None:
        n, k = self.shape = tuple(map(int, layer.weight.shape))
        self.form, self.dtype = form, layer.weight.dtype
        words, scales = form.operands("weight", form.along((n, n), k))
        self.q_weight = nn.Parameter(words.shape, words.dtype)
        self.q_scale = nn.Parameter(scales.shape, scales.dtype)
        for param in (self.q_weight, self.q_scale):
            param.attrs |= {FORM: form, WHOLE: self.shape}

    @property
    def weight(self) -> Tensor:
        """Decode the weight, ``[n, k]``."""
        n, k = self.shape
        shape = [tirx.IntImm("int64", size) for size in self.form.along((n, n), k)]

        def decoded(words: te.Tensor, scales: te.Tensor) -> te.Tensor:
            def element(*at: tirx.Var) -> tirx.Expr:
                return unpacked(self.form, (words, scales), at, self.dtype)

            return te.compute(shape, element, "dequantize")

        whole = op.tensor_expr_op(decoded, "dequantize", [self.q_weight, self.q_scale])
        return whole if self.form.axis == -1 else op.permute_dims(whole)

    def to(self, dtype: str | None = None) -> None:
        """Keep the types, which are those of the format."""


class QuantizedLinear(_Quantized, nn.Linear):
    """A projection by a weight that is stored quantised."""

    def __init__(self, layer: nn.Linear, form: Packed) -> None:
        super().__init__(layer, form)
        self.bias, self.out_dtype = layer.bias, layer.out_dtype


class QuantizedEmbedding(_Quantized, Embedding):
    """A table of rows that is stored quantised."""


class _Quantizer(nn.Mutator):
    """Puts quantised layers in the places of projections and embeddings."""

    def __init__(self, quantization: Quantization) -> None:
        self.quantization = quantization

    def visit_module(self, name: str, node: nn.Module) -> Any:
        others = not isinstance(node, ExpertLinear) and isinstance(node, nn.Linear | Embedding)
        if isinstance(node, Router) or (others and self.quantization.only_experts):
            return node
        if isinstance(node, nn.Linear):  # rows of experts stay together
            whole, rows = self.quantization.packed, self.quantization.table
            return QuantizedLinear(node, rows if isinstance(node, ExpertLinear) else whole)
        if isinstance(node, Embedding):
            return QuantizedEmbedding(node, self.quantization.table)
        return self.visit(name, node)


def quantized(model: nn.Module, quantization: Quantization) -> nn.Module:
    """Return a model with its projections and embeddings quantised; `model` is changed."""
    return _Quantizer(quantization).visit_module("", model)
