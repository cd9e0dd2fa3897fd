"""What the ``config.json`` of DeepSeek-V2 and V3 say: latent attention, choices of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..errors import ConfigError, UnsupportedFeatureError
from ..validation import check, read, shown
from .decoder_parts import Data, Fields, flag, rotary
from .expert_config import Choice, Experts, Width
from .layers import Recipe
from .rope import RopeScaling

FIELDS = (
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("qk_head_dim", "rope_interleave", "attention_bias", "mlp_bias", "moe_intermediate_size"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "first_k_dense_replace"),
    *("n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob"),
    *("routed_scaling_factor", "moe_layer_freq", "num_nextn_predict_layers", "ep_size"),
    *("aux_loss_alpha", "seq_aux", "output_router_logits", "num_local_experts", "num_experts"),
    "num_mtp_layers",
)
"""Fields beside those of every decoder, and those that change nothing of what it computes."""


@dataclass(frozen=True)
class Latent:
    """Keys and values that are made of a few features, and queries perhaps, too."""

    rank: Width
    """Features that keys and values are made of."""
    plain: Width
    rotated: Width
    """Features of a head's queries and keys that are not rotated, and those that are, which all
    heads have the same of."""
    value: Width
    """Features of a head's values."""
    query_rank: Width | None = None
    """Features that queries are made of; None where they are made of all."""
    interleaved: bool = True
    """Whether neighbours are rotated together; in a checkpoint they are then."""

    def __post_init__(self) -> None:
        check(self, ConfigError, "latent attention")
        if self.rotated % 2:
            raise ConfigError(f"qk_rope_head_dim is {self.rotated}; must be even")

    def recipes(self, attn: str, heads: int, hidden: int) -> dict[str, Recipe]:
        """Return how the weights of `attn` are parts of those of a checkpoint.

        What is rotated lies in halves, so that the first of each rotates with the second.
        """
        even, odd = (slice(n, None, 2) for n in range(2))
        turned = (even, odd) if self.interleaved else (slice(None),)
        down = self.rank + self.rotated, hidden
        up = heads * (self.plain + self.value), self.rank
        of_a, of_b = "kv_a_proj_with_mqa", "kv_b_proj"
        query = ("q_proj", hidden) if self.query_rank is None else ("q_b_proj", self.query_rank)
        size = heads * (self.plain + self.rotated), query[1]
        parts = {
            "kv_a_proj": (of_a, down, _Part(1, 0, self.rank)),
            "turned_proj": (of_a, down, _Part(1, self.rank, None, turned)),
            "k_b_proj": (of_b, up, _Part(heads, 0, self.plain)),
            "v_b_proj": (of_b, up, _Part(heads, self.plain, None)),
            query[0]: (query[0], size, _Part(heads, self.plain, None, turned, whole=True)),
        }
        return {
            f"{attn}.{name}.weight": Recipe(
                (f"{attn}.{theirs}.weight",), stored=shape, arrange=part.of
            )
            for name, (theirs, shape, part) in parts.items()
        }


@dataclass(frozen=True)
class _Part:
    """Features of each head."""

    heads: int
    first: int
    end: int | None
    order: tuple[slice, ...] = (slice(None),)
    """In which order they are."""
    whole: bool = False
    """Whether those in front of the first are there as well, as they are."""

    def of(self, weight: np.ndarray) -> np.ndarray:
        """Return the part of a weight ``[features of all heads, k]``."""
        each = weight.reshape(self.heads, -1, weight.shape[1])
        some = each[:, self.first : self.end]
        parts = [each[:, : self.first]] if self.whole else []
        parts += [some[:, order] for order in self.order]
        return np.ascontiguousarray(np.concatenate(parts, axis=1)).reshape(-1, weight.shape[1])


DEFAULTS = {
    "num_key_value_heads": None,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "routed_scaling_factor": 1.0,
}
V2 = {
    **DEFAULTS,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "first_k_dense_replace": 0,
}
V3 = {
    **DEFAULTS,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}
"""What a file leaves out, as transformers has it."""

_METHODS = {
    ("softmax", "greedy"): False,
    ("softmax", "group_limited_greedy"): True,
    ("sigmoid", "noaux_tc"): True,
}
"""How experts may be chosen, and whether that is among groups of them."""


def deepseek(data: Data) -> Fields:
    """Read the fields of DeepSeek-V2 and V3 that LLaMA's description lacks."""
    heads, kv = data.get("num_attention_heads"), data.get("num_key_value_heads")
    if kv not in (None, heads):
        raise ConfigError(
            f"num_key_value_heads is {shown(kv)}; must be {shown(heads)}, as num_attention_heads"
        )
    for key in ("attention_bias", "mlp_bias"):
        if flag(data, key, False):
            raise UnsupportedFeatureError(f"DeepSeek with {key} true is not supported")
    names = {"rank": "kv_lora_rank", "plain": "qk_nope_head_dim", "rotated": "qk_rope_head_dim"}
    names |= {"value": "v_head_dim", "query_rank": "q_lora_rank"}
    sizes = {field: data[key] for field, key in names.items()}
    latent = read(Latent, sizes, ConfigError, "latent attention", keys=names)
    rope = rotary(data)
    wide = latent.plain + latent.rotated
    return {
        "latent": replace(latent, interleaved=flag(data, "rope_interleave", True)),
        "head_dim": wide,
        "num_key_value_heads": heads,
        "query_scale": wide**-0.5 * _grown(rope["rope_scaling"]) ** 2,
        "experts": _experts(data),
        **rope,
    }


def _grown(scaling: RopeScaling) -> float:
    """Return by what queries and keys are multiplied where the context is longer."""
    if scaling.kind != "yarn" or scaling.mscale_all_dim is None:
        return 1.0
    return 1 + 0.1 * scaling.mscale_all_dim * math.log(max(scaling.factor, 1.0))


def _experts(data: Data) -> Experts:
    method = data["scoring_func"], data["topk_method"]
    if method not in [*_METHODS]:  # by comparing: lists have no hash
        raise UnsupportedFeatureError(
            f"scoring_func {shown(method[0])} with topk_method {shown(method[1])} is not supported"
        )
    if method[0] == "softmax" and flag(data, "norm_topk_prob", False):
        raise UnsupportedFeatureError("norm_topk_prob with scoring_func 'softmax' is not supported")
    if data.get("moe_layer_freq") not in (None, 1):
        raise UnsupportedFeatureError(
            f"moe_layer_freq {shown(data['moe_layer_freq'])} is not supported; only 1 is"
        )
    dense = data["first_k_dense_replace"]
    if type(dense) is not int or not 0 <= dense <= 10_000:
        raise ConfigError(
            f"first_k_dense_replace is {shown(dense)}; must be an integer from 0 to 10000"
        )
    keys = {"groups": "n_group", "chosen_groups": "topk_group", "factor": "routed_scaling_factor"}
    fields = {field: data.get(key) for field, key in keys.items()}
    fields |= {} if _METHODS[method] else {"groups": 1, "chosen_groups": 1}
    fields["sigmoid"] = method[0] == "sigmoid"
    choice = read(Choice, fields, ConfigError, "experts", keys=keys)
    keys = {"count": "n_routed_experts", "chosen": "num_experts_per_tok"}
    keys |= {"features": "moe_intermediate_size", "shared": "n_shared_experts"}
    fields = {field: data.get(key) for field, key in keys.items()}
    fields |= {"renormalised": flag(data, "norm_topk_prob", False), "choice": choice}
    fields |= {"dense_layers": tuple(range(dense)), "names": "deepseek"}
    return read(Experts, fields, ConfigError, "experts", keys=keys)
