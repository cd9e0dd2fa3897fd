"""What an attention on tensor cores costs on the TIR path.

A block alone on its multiprocessor is bound by *latency*: by the chain of operations on a block of
keys, one after the other.  What blocks share is *compute*: matrix units, and the instructions of
the softmax.  And all keys and values come from *memory* once.

Constants were fitted to 62 timings on one H200, float16, of 17 cases: prompts of LLaMA and GPT-2,
BERT and ViT, short sequences, decoding, heads of 256 features, masks, with 16 to 128 rows a block;
they are given to within 10 % (root mean square).
"""

from __future__ import annotations

from ....hardware import DeviceSpec
from ....workload import DTYPE_BYTES, Attention
from ...causal import visible_blocks, visible_keys
from ...family import Footprint
from ...gpu_cost import resident_blocks
from ...prediction import DRAM_EFFICIENCY, Bound, Prediction, ceil_div, largest
from ...shape import AttentionSize, attention_qo_bytes
from ...tile_plan import TilePlan
from ..tensor_cores.cost import NATIVE_RATE
from .tiles import holds_queries, slices

FILL_S = 2.9e-6
"""From the start of a block to its first products, and from its last ones to its end."""

STEP_S, STEP_S_PER_PRODUCT = 0.29e-6, 80e-12
"""What a block alone takes for a block of keys, and for each product of a thread: scores times
features of keys and values."""

SCORES_PER_CLOCK = 50.0
"""Scores that a multiprocessor takes through a softmax, beside products.  Assumed: three quarters
of a softmax are hidden behind the products of other warps."""

FRAGMENT_RATE = 0.42
"""Part of the tensor cores' peak that products reach on sm_90, where a warp has 32 rows."""

LOADED_RATE = 0.86
"""Part of the rate of products that is left where a warp has 16 rows, for which it loads as much
from shared memory as for 32."""

SCORE_WORK = {"softcap": 3.1, "alibi": 0.7, "bias": 2.8, "mask": 2.8}
"""What is done to a score besides, over the time of its softmax.  That of a mask is assumed."""

COMBINE_S = 1.5e-6
"""What the kernel that puts parts together adds, besides its bytes."""

SHARPNESS = 2.9
"""Exponent of the norm that joins times that overlap: the nearer they are, the longer it takes."""


def predict(
    work: Attention, plan: TilePlan, foot: Footprint, dev: DeviceSpec, size: AttentionSize
) -> Prediction:
    """Return what the kernel of `plan` costs at `size`."""
    group = work.q_heads // work.kv_heads
    tiles = ceil_div(size.q_len * group, plan.block_m)
    blocks = size.batch * work.kv_heads * tiles * plan.split_k
    mean, most = visible_blocks(work, plan, size, max(1, plan.block_m // group))
    mean, most = mean / plan.split_k, ceil_div(most, plan.split_k)
    resident = resident_blocks(foot, dev)
    per_sm = float(ceil_div(blocks, dev.sm_count))
    rounds = float(ceil_div(max(blocks, 1), dev.sm_count * resident))
    if work.causal != "none" and rounds > 1:  # the shortest come last, and fill the gaps
        per_sm = blocks / dev.sm_count
        rounds = per_sm / resident
    keys = visible_keys(work, size)
    each = (work.head_dim + work.v_dim) * DTYPE_BYTES[work.dtype]
    moved = attention_qo_bytes(work, size) + size.batch * work.kv_heads * keys * each
    terms: dict[Bound, float] = {
        "dram": moved / (dev.dram_bytes_per_s * DRAM_EFFICIENCY),
        "compute": max(per_sm * mean, most) * _step_s(work, plan, dev),
        "latency": max(rounds * mean, most) * _chain_s(work, plan),
    }
    joined = sum(t**SHARPNESS for t in terms.values()) ** (1 / SHARPNESS)
    terms["launch"] = dev.launch_s + max(rounds, 1.0) * FILL_S
    seconds = terms["launch"] + joined + _combine_s(work, plan, dev, size)
    waves = ceil_div(max(blocks, 1), dev.sm_count * resident)
    return Prediction(seconds, moved, work.flops(**size._asdict()), waves, largest(terms))


def _features(work: Attention) -> int:
    """Return the features of a key and a value, as they are multiplied."""
    return 16 * (slices(work.head_dim, work) + slices(work.v_dim, work))


def _score_work(work: Attention) -> float:
    """Return the time of a score's softmax, and of what is done to it before, over the former."""
    given = {
        "softcap": work.softcap,
        "alibi": work.alibi,
        "bias": work.bias_dims,
        "mask": work.mask_dims,
    }
    return 1.0 + sum(SCORE_WORK[name] for name, value in given.items() if value is not None)


def _step_s(work: Attention, plan: TilePlan, dev: DeviceSpec) -> float:
    """Return what a block of keys takes of a multiprocessor that has enough blocks."""
    rate = dev.tensor_flops_per_s(work.dtype) / dev.sm_count
    rate *= FRAGMENT_RATE if dev.capabilities.warp_group_mma else NATIVE_RATE
    rate *= 1.0 if plan.reg_m > 16 else LOADED_RATE
    products = 2.0 * plan.block_m * plan.block_n * _features(work) / rate
    scores = plan.block_m * plan.block_n * _score_work(work)
    return products + scores / (SCORES_PER_CLOCK * dev.clock_hz)


def _chain_s(work: Attention, plan: TilePlan) -> float:
    """Return what the operations on a block of keys take, one after the other, in one block."""
    scores = plan.reg_m * plan.block_n / 32
    again = 1.0 if holds_queries(plan, work) else 1.1
    return STEP_S + again * scores * _features(work) * STEP_S_PER_PRODUCT * _score_work(work)


def _combine_s(work: Attention, plan: TilePlan, dev: DeviceSpec, size: AttentionSize) -> float:
    """Return what putting the parts together adds."""
    if plan.split_k == 1:
        return 0.0
    rows = size.batch * work.q_heads * size.q_len
    moved = 2.0 * rows * plan.split_k * work.v_dim * DTYPE_BYTES["float32"]
    return COMBINE_S + moved / dev.l2_bytes_per_s
