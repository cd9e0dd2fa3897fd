"""Layers whose weights are stored quantised, and decoded wherever they are read.

A decoding is the call of a PrimFunc, as MLC-LLM writes it, so that the passes see what they see in
its models: matmuls and lookups take it in, and no weight is written to memory.
"""

from __future__ import annotations

from typing import Any

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from ..compute.packed import unpacked
from ..quantization import Quantization
from ..workload import Packed
from .layers import Embedding

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
        if isinstance(node, nn.Linear):
            return QuantizedLinear(node, self.quantization.packed)
        if isinstance(node, Embedding):
            return QuantizedEmbedding(node, self.quantization.table)
        return self.visit(name, node)


def quantized(model: nn.Module, quantization: Quantization) -> nn.Module:
    """Return a model with its projections and embeddings quantised; `model` is changed."""
    return _Quantizer(quantization).visit_module("", model)
