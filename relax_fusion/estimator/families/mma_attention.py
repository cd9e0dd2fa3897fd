"""Attention by tensor cores on the TIR path: the family "mma" of attention (sm_80 and newer).

A thread block has ``block_m`` rows, each a query of one of the heads that share keys, ``reg_m`` of
them in a warp, and walks over the keys, ``block_n`` at a time, with ``num_stages`` such blocks of
keys and values in shared memory or on their way to it.  With few rows, the keys are cut into
``split_k`` parts for as many blocks, whose results another kernel puts together.

A block alone on its multiprocessor is bound by *latency*: by the chain of operations on a block of
keys, one after the other.  What blocks share is *compute*: matrix units, and the instructions of
the softmax.  And all keys and values come from *memory* once.  The constants of the price were
fitted to 62 timings on one H200, float16, of 17 cases: prompts of LLaMA and GPT-2, BERT and ViT,
short sequences, decoding, heads of 256 features, masks, with 16 to 128 rows a block; they are given
to within 10 % (root mean square).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from ...hardware import DeviceSpec
from ...hardware.instructions import PIECE_BYTES, SLICE_BYTES
from ...workload import DTYPE_BYTES, Attention
from ..causal import visible_blocks, visible_keys
from ..family import Breaks, KernelFamily
from ..gpu_cost import resident_blocks
from ..limits import block_limits, vector_loads
from ..prediction import DRAM_EFFICIENCY, HALF_DTYPES, Bound, Prediction, ceil_div, largest
from ..shape import AttentionSize, Size, attention_qo_bytes, attention_size
from ..steps import Footprint
from ..tile_plan import TilePlan
from .attention_tiles import head_extents, holds_features
from .fma_attention import FmaAttention
from .tensor_cores.cost import NATIVE_RATE
from .tensor_cores.tiles import FAMILY, GROUP_ROWS, WARP_TILE, lacks_instructions

MOST_FEATURES = 256
"""Of a head; more leave no registers for the sums of a row."""

QUERY_REGISTERS = 32
"""Registers in which a lane keeps its queries; more are loaded for every block of keys."""

LEAST_STAGES = 2

OVERHEAD_REGISTERS = 44
"""Of a thread, beside sums, scores and queries: operands on their way, addresses, rows."""

ADDRESS_REGISTERS = 24
"""Of a thread, beside those, where it reads something for each score."""

TILES = ((128, 32), (128, 16), (64, 16), (64, 32), (32, 16), (16, 16))
"""Rows of a block and of a warp."""

KEYS = (64, 128, 32)

FEW_ROWS = 16
"""Rows of a block up to which longer pipelines, and keys in parts, are looked at.  With more rows,
third stages gained nothing where they fit, and cost the room for other blocks."""

STAGES, PARTS = (2, 3), (1, 4, 8, 16, 32, 64)

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


class MmaAttention(KernelFamily[Attention]):
    """A block has a tile of query rows; tensor cores multiply what lies in shared memory."""

    names = (FAMILY,)
    takes = (Attention,)
    emitter = "relax_fusion.dlight_rules.tensor_cores.attention:emit"
    error = 1.2
    instead_of = (FmaAttention,)
    breaks = Breaks((1, 16, 64, 256, 512, 1024), 4096, (32, 8, 1))

    def refuses(self, work: Attention, dev: DeviceSpec) -> str | None:
        """Refuse dtypes, features and devices that its instructions are not for."""
        if work.dtype not in HALF_DTYPES:
            return f"dtype is {work.dtype}, family {FAMILY!r} takes {' and '.join(HALF_DTYPES)}"
        for name, value in head_extents(work).items():
            if value % 2 or value > MOST_FEATURES:
                most = f"even widths up to {MOST_FEATURES}"
                return f"{name} is {value}, family {FAMILY!r} takes {most}"
        lacking = lacks_instructions(work.dtype, dev)
        return f"family {FAMILY!r} {lacking}" if lacking else None

    def plans(self, work: Attention, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield tiles of rows and keys, few rows with the keys in parts."""
        lanes = copy_lanes(work)
        for (block_m, reg_m), block_n in product(TILES, KEYS):
            few = block_m <= FEW_ROWS
            for stages, parts in product(STAGES, PARTS) if few else ((LEAST_STAGES, 1),):
                yield TilePlan(
                    *(block_m, block_n, work.head_dim),
                    reg_m=reg_m,
                    reg_n=block_n,
                    lanes=lanes,
                    split_k=parts,
                    num_stages=stages,
                    num_warps=block_m // reg_m,
                    family=FAMILY,
                )

    def worth(
        self, plans: Sequence[TilePlan], work: Attention, dev: DeviceSpec, rows: tuple[int, int]
    ) -> Iterable[TilePlan]:
        """Offer tiles of 64 rows at any size: they cost no more than fewer."""
        return (p for p in plans if p.block_m <= max(rows[1], GROUP_ROWS))

    def violations(self, plan: TilePlan, work: Attention, dev: DeviceSpec) -> Iterator[str]:
        """Yield what fragments and copies ask for, and what a block has not."""
        yield from _fragments(plan)
        yield from holds_features(plan, work)
        yield from block_limits(self.footprint(plan, work, dev), plan, work, dev)
        yield from vector_loads(plan, work.dtype, head_extents(work))

    def footprint(self, plan: TilePlan, work: Attention, dev: DeviceSpec) -> Footprint:
        """Return queries and stages of keys and values, and the fragments of a thread."""
        heads, values = slices(work.head_dim, work), slices(work.v_dim, work)
        keys = plan.num_stages * plan.block_n * (heads + values)
        smem_bytes = (plan.block_m * heads + keys) * SLICE_BYTES
        sums = plan.reg_m * values * WARP_TILE // 32
        scores = plan.reg_m * plan.reg_n // 32
        queries = plan.reg_m // WARP_TILE * 4
        if holds_queries(plan, work):
            queries *= heads
        addresses = ADDRESS_REGISTERS if work.bias_dims or work.mask_dims else 0
        registers = sums + scores + queries + addresses + OVERHEAD_REGISTERS
        return Footprint(smem_bytes, registers, plan.num_warps * dev.warp_size)

    def predict(self, plan: TilePlan, work: Attention, dev: DeviceSpec, size: Size) -> Prediction:
        """Price the blocks of the busiest multiprocessor, and putting parts together.

        By a model that was fitted to these kernels.
        """
        size, group = attention_size(work, size), work.q_heads // work.kv_heads
        tiles = ceil_div(size.q_len * group, plan.block_m)
        blocks = size.batch * work.kv_heads * tiles * plan.split_k
        mean, most = visible_blocks(work, plan, size, max(1, plan.block_m // group))
        mean, most = mean / plan.split_k, ceil_div(most, plan.split_k)
        resident = resident_blocks(self.footprint(plan, work, dev), dev)
        per_sm = float(ceil_div(blocks, dev.sm_count))
        waves = ceil_div(max(blocks, 1), dev.sm_count * resident)
        rounds = float(waves)
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
        return Prediction(seconds, moved, work.flops(**size._asdict()), waves, largest(terms))


def slices(features: int, work: Attention) -> int:
    """Return how many instructions it takes to multiply some features."""
    return ceil_div(features * DTYPE_BYTES[work.dtype], SLICE_BYTES)


def holds_queries(plan: TilePlan, work: Attention) -> bool:
    """Tell whether a warp keeps its queries in registers."""
    return plan.reg_m // WARP_TILE * slices(work.head_dim, work) * 4 <= QUERY_REGISTERS


def copy_lanes(work: Attention) -> int:
    """Return the elements of one copy: as many as divide both widths, which are even."""
    most = PIECE_BYTES // DTYPE_BYTES[work.dtype]
    return next(n for n in (most, most // 2, 2) if not (work.head_dim % n or work.v_dim % n))


def _fragments(plan: TilePlan) -> Iterator[str]:
    """Yield what is wrong with `plan`, besides the limits of the device."""
    family = f"family {plan.family!r}"
    for name in ("block_m", "block_n", "reg_m", "reg_n"):
        if getattr(plan, name) % WARP_TILE:
            yield f"{name} is {getattr(plan, name)}, {family} takes multiples of {WARP_TILE}"
    if plan.reg_n != plan.block_n:
        yield f"reg_n is {plan.reg_n}, a warp of {family} takes all {plan.block_n} keys of a block"
    if plan.num_stages < LEAST_STAGES:
        yield f"num_stages is {plan.num_stages}, {family} needs {LEAST_STAGES}"
    warps = plan.block_m // plan.reg_m
    if plan.num_warps != warps:
        yield f"num_warps is {plan.num_warps}, {plan.block_m} rows of {plan.reg_m} make {warps}"
    if plan.lanes < 2:
        yield f"lanes is {plan.lanes}, {family} copies 2 elements at least"


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
