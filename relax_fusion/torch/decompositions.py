"""Into which operators PyTorch writes a model out before it is translated."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.fx import GraphModule
from torch.nn.functional import gelu, interpolate, layer_norm, linear, relu, softmax

from ..frontends import promotion

_aten = torch.ops.aten

_WHOLE = (_aten.silu.default, _aten.gelu.default, _aten.native_layer_norm.default)
"""Operators that our patterns know as they are."""

_OF_KEYS = 1
"""The kind of a mask that hides keys by sequence, in PyTorch's fast path; others hide scores."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return how operators are written out, those of fast paths, too; our patterns' are left."""
    own = {
        _aten._transformer_encoder_layer_fwd.default: _encoder_layer,
        _aten._native_multi_head_attention.default: _self_attention,
    }
    table = promotion.decompositions() | own
    return {op: how for op, how in table.items() if op not in _WHOLE}


def repeat_pixels(module: GraphModule) -> None:
    """Let an image that Dynamo's graph enlarges by a power of two repeat its pixels.

    PyTorch computes their indices from the sizes, of which symbolic ones have no form in Relax.
    """
    for node in module.graph.find_nodes(op="call_function", target=interpolate):
        given = signature(interpolate).bind(*node.args, **node.kwargs).arguments
        nearest = given.get("mode", "nearest") == "nearest" and given.get("size") is None
        fits = nearest and given["input"].meta["example_value"].dim() == 4
        if fits and given.get("scale_factor") in (2, 4, 8):
            node.target, node.kwargs = _repeated, {}
            node.args = (given["input"], int(given["scale_factor"]))
    module.recompile()


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    *lead, height, width = x.shape
    made = x[..., None, :, None].expand(*lead, height, times, width, times)
    made = made.reshape(*lead, height * times, width * times)
    return made.contiguous(memory_format=suggest_memory_format(x))


def _encoder_layer(x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Write out the fast path of ``torch.nn.TransformerEncoderLayer``."""
    width, use_gelu, norm_first, eps = args[0], *args[6:9]
    gamma1, beta1, gamma2, beta2, up, up_bias, down, down_bias, *masks = args[9:]

    def attend(y: torch.Tensor) -> torch.Tensor:
        mask, kind = [*masks, None, None][:2]
        return _self_attention(y, y, y, *args[:6], mask, False, True, kind)[0]

    def feed(y: torch.Tensor) -> torch.Tensor:
        inner = linear(y, up, up_bias)
        return linear(gelu(inner) if use_gelu else relu(inner), down, down_bias)

    def norm1(y: torch.Tensor) -> torch.Tensor:
        return layer_norm(y, (width,), gamma1, beta1, eps)

    def norm2(y: torch.Tensor) -> torch.Tensor:
        return layer_norm(y, (width,), gamma2, beta2, eps)

    if norm_first:
        x = x + attend(norm1(x))
        return x + feed(norm2(x))
    x = norm1(x + attend(x))
    return norm2(x + feed(x))


def _self_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write out the fast path of ``torch.nn.MultiheadAttention``; True in a mask hides a key."""
    embed_dim, heads, qkv_weight, qkv_bias, proj_weight, proj_bias, *more = args
    # as the operator's schema has it
    defaults: tuple[Any, ...] = (None, True, True, None)
    mask, need_weights, average_weights, mask_type = (*more, *defaults[len(more) :])
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    q, k, v = (
        linear(x, weight, bias).view(*x.shape[:2], heads, -1).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    scores = q @ k.transpose(-1, -2) * (embed_dim // heads) ** -0.5
    if mask is not None:
        if mask_type == _OF_KEYS:
            mask = mask[:, None, None, :]
        hidden = mask if mask.dtype == torch.bool else mask != 0
        scores = scores.masked_fill(hidden, float("-inf"))
    shares = softmax(scores, -1)
    if mask is not None:  # the fast path gives zeros to a query that sees nothing
        shares = shares.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    found = linear((shares @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return found, None
    return found, shares.mean(1) if average_weights else shares
