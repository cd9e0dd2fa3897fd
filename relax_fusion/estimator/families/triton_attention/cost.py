"""What the launches of an attention under a plan of the Triton back end cost.

A program goes through blocks of keys: it fetches one, multiplies, takes the softmax, multiplies.
Each of these waits for the one before, so a program alone on its multiprocessor is bound by
*latency*: by the chain of a block's operations, or by how many blocks are on their way at once.
What programs share is *compute*: matrix units, exponentials, the way from L2.  And all keys and
values come from *memory* once.  How many programs a multiprocessor holds decides between the first
two: those that find no room run after the others, and begin as these did.

Constants were fitted to timings on an H200, float16, graph replays with a cold L2:
`2026-11-21-judge_attention.json`.
"""

from __future__ import annotations

from typing import NamedTuple

from ....hardware import DeviceSpec
from ....workload import DTYPE_BYTES, Attention
from ...prediction import ceil_div
from ...shape import AttentionSize
from ...tile_plan import TilePlan
from ..attention_tiles import visible_blocks, visible_keys
from .tiles import (
    HALVES_BLOCKS,
    AttentionPlan,
    bias_tiles,
    few_scores,
    heads_of_tile,
    key_parts,
    multiplied,
    padded,
    resident,
    row_tiles,
    two_tiles,
    warp_groups,
)

FILL_S = {"attention": 1.9e-6, "flash": 4.8e-6, "groups": 2.9e-6, "halves": 3.4e-6}
"""What a program takes beside its blocks of keys: it begins, and stores its results.  In `flash`
and the kernels for short sequences, with the wait for the first block."""

QUERIES_FIRST_S = 0.45e-6
"""What it adds that larger pointer tiles wait for their queries before they ask for keys."""

FETCH_S, FETCH_S_PER_BYTE = 0.84e-6, 19e-12
"""From asking for a block of keys and values to having it, and for each of its bytes.  With s
stages s - 1 of them are on their way."""

STAGE_S = 0.25e-6
"""What a pointer program takes for each stage that asks for a block where there is none: with one
block of 64 keys, two stages took 3.2 us and four 3.8 (`2026-11-29-decode_attention.log`).  The
matmuls behind it took up to a tenth longer, too, beside the shared memory of four."""

FRAGMENT_STEP_S, FRAGMENT_STEP_S_PER_SCORE = 0.47e-6, 14e-9
"""What a pointer program alone takes for a block that passes through registers into the matrix
units, and for each score of a thread."""

GROUP_STEP_S, GROUP_STEP_S_PER_PRODUCT = 0.27e-6, 49e-12
"""The same where warp groups multiply from shared memory, and for each product of a thread: scores
times features of keys and values."""

BLOCK_S = {"attention": 0.13e-6, "flash": 0.22e-6}
"""What a block of keys costs besides, however many programs there are: barriers, row maxima."""

FRAGMENT_EFFICIENCY = 0.24
"""Reached part of the tensor cores' peak where operands pass through registers."""

TENSOR_EFFICIENCY = {"attention": 0.84, "flash": 0.93}
"""The same where warp groups multiply, before what overlaps badly."""

SCORES_PER_CLOCK = 8.5
"""Scores that a multiprocessor takes through a softmax: scale, maximum, exponential, sum, convert.
Exponentials alone would be 16."""

FEED_BYTES_PER_CLOCK = 60.0
"""What a multiprocessor fetches from L2, through pointers."""

OVERLAP = {"attention": 0.57, "flash": 0.16}
"""Part of the second longest of matmuls, softmax and fetching that the longest does not hide."""

SCORE_WORK = {"softcap": 1.5, "alibi": 0.6, "line": 0.3}
"""What is done to a score besides, over the time of its softmax.  Assumed is that of a bias or mask
with one value a key (or a query), of which a tile reads a line."""

READ_SCORE_WORK = {"attention": 0.9, "flash": 1.85, "copied": 0.8}
"""The same for a bias of every score, which pointer tiles copy ahead, as `flash` does where it is
``copied`` as tiles; assumed for a mask."""

EDGE_S, EDGE_S_PER_SCORE = 1.6e-6, 0.21e-9
"""What an edge adds to a tile, where some rows see a part of a block of keys: to one of `flash`,
and to a pointer tile for each score of a block."""

RAGGED_EDGE = 0.5
"""Part of that which keys cost that do not fill their last block: the mask is the same for all."""

SHORT_S_PER_SCORE = {"groups": 0.26e-9, "halves": 0.078e-9}
"""What each score takes in the kernels for short sequences, at 64 features."""

COMBINE_S, COMBINE_S_PER_BYTE = 2.2e-6, 0.5e-12
"""What the launch that puts parts together adds, and each byte of them, written and read."""

COMBINE_LATE_S, COMBINES_PER_ROOM = 1.4e-6, 8
"""What it adds if its programs, a row each, find no room beside those that they wait for; and how
many fit where one of those would."""

SHARPNESS = 5.0
"""Exponent of the norm that joins times that overlap: the nearer they are, the longer it takes."""


class Load(NamedTuple):
    """The programs of a launch, of the busiest multiprocessor, and the blocks of keys of one."""

    programs: int
    parts: int
    mean: float
    most: float
    per_sm: float
    resident: int
    rounds: float

    @property
    def blocks(self) -> float:
        """Blocks of the busiest multiprocessor."""
        return max(self.per_sm * self.mean, self.most)


def joined(*times: float) -> float:
    """Return how long it takes what overlaps, but not wholly."""
    return float(sum([t**SHARPNESS for t in times]) ** (1 / SHARPNESS))


def load(work: Attention, plan: AttentionPlan, dev: DeviceSpec, size: AttentionSize) -> Load:
    """Return the programs of the launch, and how they fill the device."""
    shared = heads_of_tile(plan, work)
    tiles = size.batch * (work.q_heads // shared) * row_tiles(plan, work, size.q_len)
    mean, most = visible_blocks(work, plan, size, max(1, plan.block_m // shared))
    parts = key_parts(plan, work, dev, size)
    if parts > 1:
        mean, most = mean / parts, ceil_div(most, parts)
    programs, held = tiles * parts, resident(plan, work, dev)
    per_sm = float(ceil_div(programs, dev.sm_count))
    rounds = float(ceil_div(max(programs, 1), dev.sm_count * held))
    if work.causal != "none" and per_sm > 1:  # the shortest come last, and fill the gaps
        per_sm = programs / dev.sm_count
        rounds = max(1.0, per_sm / held)
    return Load(programs, parts, mean, most, per_sm, held, rounds)


def pointer_first_s(work: Attention, plan: AttentionPlan, blocks: float) -> float:
    """Return what a pointer program of so many blocks takes until the first of them is there."""
    queries = 0.0 if few_scores(plan) else QUERIES_FIRST_S
    idle = STAGE_S * max(0.0, plan.num_stages - 1 - blocks)
    return FILL_S["attention"] + fetch_s(work, plan) + queries + idle


def pointer_step_s(work: Attention, plan: AttentionPlan, dev: DeviceSpec, blocks: float) -> float:
    """Return what a pointer program alone takes for each of its blocks of keys, on average.

    It waits for none of those that it asked for at first.
    """
    under_way = max(1, plan.num_stages - 1)
    waits = fetch_s(work, plan) / under_way * min(1.0, max(0.0, blocks - under_way))
    return joined(chain_s(work, plan, dev), waits)


def fetch_s(work: Attention, plan: AttentionPlan) -> float:
    """Return the time from asking for a block of keys and values to having it."""
    return FETCH_S + block_bytes(work, plan) * FETCH_S_PER_BYTE


def short_s(work: Attention, plan: AttentionPlan) -> float:
    """Return what a program of the kernels for short sequences takes besides its latencies."""
    if plan.family == "groups":
        keys, width = plan.groups * plan.block_n, two_tiles(work.head_dim)
    else:
        keys, width = HALVES_BLOCKS * plan.block_n, padded(work.head_dim)
    each = SHORT_S_PER_SCORE[plan.family] * _score_work(work, plan)
    return plan.block_m * keys * width / 64 * each


def kv_bytes(work: Attention, size: AttentionSize) -> float:
    """Return the bytes of the keys and values that some query sees."""
    each = (work.head_dim + work.v_dim) * DTYPE_BYTES[work.dtype]
    return float(size.batch * work.kv_heads * visible_keys(work, size) * each)


def block_bytes(work: Attention, plan: TilePlan) -> int:
    """Return the bytes of a block of keys and values."""
    return plan.block_n * (work.head_dim + work.v_dim) * DTYPE_BYTES[work.dtype]


def _score_work(work: Attention, plan: TilePlan) -> float:
    """Return the time of a score's softmax, and of what is done to it before, over the former."""
    found = 1.0
    for name, given in (("softcap", work.softcap), ("alibi", work.alibi)):
        found += 0.0 if given is None else SCORE_WORK[name]
    read = "attention" if plan.family == "attention" else "flash"
    bias = "copied" if bias_tiles(plan, work) else read
    for how, dims in ((bias, work.bias_dims), (read, work.mask_dims)):
        if dims is not None:
            found += READ_SCORE_WORK[how] if dims[2] and dims[3] else SCORE_WORK["line"]
    return found


def _matmuls_s(work: Attention, plan: TilePlan, dev: DeviceSpec) -> float:
    """Return how long a multiprocessor's matrix units take for a block of keys."""
    efficiency = TENSOR_EFFICIENCY[plan.family]
    if plan.family == "attention" and not warp_groups(plan, dev):
        efficiency = FRAGMENT_EFFICIENCY
    per_sm = dev.tensor_flops_per_s(work.dtype) / dev.sm_count * efficiency
    width = sum(multiplied(d, plan.family) for d in (work.head_dim, work.v_dim))
    return 2.0 * plan.block_m * plan.block_n * width / per_sm


def block_s(work: Attention, plan: TilePlan, dev: DeviceSpec) -> float:
    """Return what a block of keys takes of a multiprocessor that has enough programs."""
    scores = plan.block_m * plan.block_n * _score_work(work, plan)
    times = [_matmuls_s(work, plan, dev), scores / (SCORES_PER_CLOCK * dev.clock_hz)]
    if plan.family == "attention":
        times.append(block_bytes(work, plan) / (FEED_BYTES_PER_CLOCK * dev.clock_hz))
    *_, second, longest = sorted(times)
    return longest + OVERLAP[plan.family] * second + BLOCK_S[plan.family]


def chain_s(work: Attention, plan: TilePlan, dev: DeviceSpec) -> float:
    """Return what the operations on a block of keys take, one after the other, in one program."""
    scores = plan.block_m * plan.block_n / (32 * plan.num_warps)
    if warp_groups(plan, dev):
        width = padded(work.head_dim) + padded(work.v_dim)
        return GROUP_STEP_S + scores * width * GROUP_STEP_S_PER_PRODUCT
    return FRAGMENT_STEP_S + scores * _score_work(work, plan) * FRAGMENT_STEP_S_PER_SCORE


def edges(work: Attention, plan: TilePlan, size: AttentionSize) -> float:
    """Return what partly visible blocks add to a tile."""
    ragged = work.causal == "none" and size.kv_len % plan.block_n != 0
    edges = (work.causal != "none") + (work.window is not None) + ragged * RAGGED_EDGE
    scores = plan.block_m * plan.block_n
    return edges * (EDGE_S if plan.family == "flash" else scores * EDGE_S_PER_SCORE)


def combine_s(
    work: Attention, plan: TilePlan, dev: DeviceSpec, size: AttentionSize, load: Load
) -> float:
    """Return what merging the parts adds."""
    if load.parts == 1:
        return 0.0
    rows = size.batch * work.q_heads * size.q_len
    moved = 2.0 * rows * load.parts * work.v_dim * DTYPE_BYTES["float32"]
    free = dev.sm_count * load.resident - load.programs
    late = COMBINE_LATE_S if free * COMBINES_PER_ROOM < rows else 0.0
    return COMBINE_S + moved * COMBINE_S_PER_BYTE + late
