"""The attention cases in dtypes of tensor cores, and longer ones."""

from __future__ import annotations

from dataclasses import replace

from ..support.attention_cases import Case
from ..support.estimator_cases import attention

LARGER = attention(2, 300, 500, (4, 2))
"""Several tiles of rows, and of keys, neither of them whole."""

EVERY = (True, True, True, True)


def larger_cases() -> list[Case]:
    """Return workloads of several tiles, each with one thing that is not plain."""
    changes: dict[str, dict[str, object]] = {
        "plain": {},
        "layouts": {"q_layout": "bnsh", "kv_layout": "bnsh", "out_layout": "bnsh"},
        "mixed_layouts": {"q_layout": "bnsh", "out_layout": "bnsh"},
        "heads_of_their_own_512": {"kv_heads": 4, "kv_len": 512},
        "heads_of_their_own_256": {"kv_heads": 4, "kv_len": 256, "q_layout": "bnsh"},
        "multi_query": {"kv_heads": 1},
        "three_of_a_group": {"q_heads": 3, "kv_heads": 1, "q_len": 130},
        "decode": {"q_len": 1, "kv_len": 3000, "q_heads": 8, "kv_heads": 1},
        "few_queries": {"q_len": 5, "kv_len": 2000, "causal": "bottom_right"},
        "top_left": {"causal": "top_left"},
        "bottom_right": {"causal": "bottom_right", "dtype": "bfloat16", "out_dtype": "bfloat16"},
        "more_queries_than_keys": {"causal": "bottom_right", "q_len": 500, "kv_len": 300},
        "window": {"causal": "bottom_right", "window": 100},
        "window_both_sides": {"window": 100},
        "softcap": {"softcap": 20.0, "causal": "top_left"},
        "bias": {"bias_dims": (False, True, True, True), "bias_dtype": "float16"},
        "bias_in_tiles": {"bias_dims": EVERY, "bias_dtype": "float16", "kv_len": 600},
        "bias_of_all_in_tiles": {
            "causal": "bottom_right",
            "kv_len": 1024,
            "bias_dims": (False, False, True, True),
            "bias_dtype": "float16",
        },
        "bias_float32": {"bias_dims": (True, False, False, True)},
        "bias_min": {"bias_dims": EVERY, "bias_op": "min", "causal": "top_left"},
        "mask": {"mask_dims": EVERY},
        "mask_of_keys": {"mask_dims": (True, False, False, True), "causal": "bottom_right"},
        "alibi": {"alibi": "float32", "causal": "bottom_right"},
        "sinks": {"sinks": "float16", "causal": "bottom_right", "window": 64},
        "everything": {
            "causal": "bottom_right",
            "window": 200,
            "softcap": 20.0,
            "bias_dims": (False, False, True, True),
            "mask_dims": (True, False, False, True),
            "alibi": "float32",
            "sinks": "float32",
        },
        "float32_out": {"out_dtype": "float32", "causal": "top_left"},
        **{f"head_dim_{d}": {"head_dim": d, "v_dim": d} for d in (32, 80, 96, 128, 192, 256)},
        "narrow_values": {"head_dim": 128, "v_dim": 64, "causal": "top_left"},
        "wide_values": {"head_dim": 64, "v_dim": 128},
    }
    found = [Case(name, replace(LARGER, **change)) for name, change in changes.items()]
    cache = replace(LARGER, causal="bottom_right", kv_prefix=True)
    return [
        *found,
        Case("cache", cache, {"kv_capacity": 1000}),
        Case("cache_heads_first", replace(cache, kv_layout="bnsh"), {"kv_capacity": 1000}),
        Case("cache_decode", replace(cache, q_len=1, kv_heads=1), {"kv_capacity": 600}),
    ]
