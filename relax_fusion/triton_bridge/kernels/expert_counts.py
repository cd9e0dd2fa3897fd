"""How many pairs of token and expert each expert has, of every chunk of pairs."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .experts import expert_at


@triton.constexpr_function
def bins_of(experts):
    """Return how many counters a histogram of experts has: a power of two, one a lane at least."""
    return max(32, triton.next_power_of_2(experts))


@triton.jit
def expert_counts(
    ids_ptr, counts_ptr, pairs,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count the pairs of each expert in a chunk.  Grid and parameters: as of `expert_order`.

    ``counts_ptr``, int32 ``[chunks, bins_of(EXPERTS)]``, gets the numbers.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    experts = expert_at(ids_ptr, index, index < pairs, EXPERTS)
    counts = tl.histogram(experts, bins_of(EXPERTS), mask=index < pairs)
    bins = tl.arange(0, bins_of(EXPERTS))
    tl.store(counts_ptr + tl.program_id(0) * bins_of(EXPERTS) + bins, counts)
