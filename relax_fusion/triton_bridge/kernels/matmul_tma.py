"""Matmul of many rows on Hopper: bulk tensor copies, persistent programs, grouped tiles.

``act(x @ W^T + bias) [+ residual]`` or ``act(x @ Wg^T) * (x @ Wu^T)``; a norm comes before, as
`row_norm`, since the copy engine moves bytes to shared memory and lets nobody touch them.

Regime: operations, ``2 rows n k`` (gated: twice), from about 200 rows on.  Bytes from L2 are
``2 k rows n (1 / BLOCK_M + 1 / BLOCK_N)``, so tiles of 128 x 256 halve those of 128 x 128.

Shape: one program a multiprocessor walks tiles `num_programs` apart, grouped for L2.  With
`FLATTEN` its two loops become one, and the next tile's copies start while the last one is stored:
worth 1 to 4 % for the plain form.  The gated form holds two accumulators of ``BLOCK_M x BLOCK_N``,
and each tile of x feeds both; flattening it costs 25 % (measured with Triton 3.6: the products of
one tile then wait for each other).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .matmul_pointer import multiply
from .tiles import half_start, store_output, swizzled_tile, tile_features


@triton.jit
def load_weight(desc, n_start, k_start, LAYOUT: tl.constexpr):
    """Load a weight tile as ``[n, k]``."""
    if LAYOUT == "nk":
        return desc.load([n_start, k_start])
    else:
        return desc.load([k_start, n_start]).T


@triton.jit
def matmul_tma(
    x,
    w,
    up,
    bias_ptr,
    up_bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    LAYOUT: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FLATTEN: tl.constexpr,
    PDL: tl.constexpr,
    MERGED: tl.constexpr = "no",
    cos_ptr=None,
    sin_ptr=None,
    positions=None,
    HALF: tl.constexpr = 0,
    ROTATED: tl.constexpr = 0,
):
    """Compute every ``num_programs``-th tile.  Grid: ``(min(tiles, multiprocessors),)``.

    Parameters
    ----------
    x : tensor descriptor of [M, K], block [BLOCK_M, BLOCK_K]
    w, up : tensor descriptors of [N, K], block [BLOCK_N, BLOCK_K]
        Layout ``"kn"``: of [K, N], block [BLOCK_K, BLOCK_N].  Merged: both of the whole weight.
    bias_ptr, up_bias_ptr : [N];  residual_ptr, out_ptr : [M, N]
    M : int32
    MERGED : {"no", "gate_first", "up_first"}
        Whether both weights (and biases) lie in one tensor.
    cos_ptr, sin_ptr : [positions, 2 HALF], any float dtype
        With `HALF`: of the angles by which pairs of features `HALF` apart are turned.
    positions : int32
        Row i takes row ``i % positions`` of them; None for row i.
    HALF, ROTATED : int
        Half the width of a head, and how many features are rotated; 0 for no rotation.
        `BLOCK_N` is then a multiple of ``2 HALF``: a copied tile holds whole heads.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    k_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = swizzled_tile(tile, tiles_m, tiles_n, GROUP_M)
        n_start = tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k_tile in tl.range(k_tiles, num_stages=NUM_STAGES):
            k_start = k_tile * BLOCK_K
            x_tile = x.load([tile_m * BLOCK_M, k_start])
            w_tile = load_weight(w, half_start(False, N, MERGED) + n_start, k_start, LAYOUT)
            acc = multiply(w_tile, x_tile, acc, False)
            # After the first product, not before it (measured: 4 % faster, though it takes a
            # barrier more), so that the first one does not wait for this copy.
            if GATED:
                up_tile = load_weight(up, half_start(True, N, MERGED) + n_start, k_start, LAYOUT)
                acc_up = multiply(up_tile, x_tile, acc_up, False)
        m_index = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        n_index = tile_features(tile_n, BLOCK_N, HALF)
        store_output(
            out_ptr,
            residual_ptr,
            bias_ptr,
            up_bias_ptr,
            acc,
            acc_up,
            m_index,
            n_index,
            M,
            N,
            GATED,
            MERGED,
            HAS_BIAS,
            ACTIVATION,
            RESIDUAL,
            (cos_ptr, sin_ptr, positions, tile_n),
            HALF,
            ROTATED,
        )
