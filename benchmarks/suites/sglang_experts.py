"""SGLang's Triton kernels of experts, the public ones, as a peer of `run experts`.

What SGLang does on an NVIDIA GPU for bfloat16: a grouped matmul, the gate, a second one that
multiplies by the shares, and the sum of a token's experts, with the tiles that SGLang's files hold
for the device.  Its routing and its table of tiles are not timed: they are made before.  So a
layer of ours, from the router to the sum, is compared with less than a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

Weights = dict[str, torch.Tensor]


def is_here() -> bool:
    """Tell whether SGLang's kernels can be imported."""
    return find_spec("sglang") is not None


def tiles_of(ids: torch.Tensor, block: int, experts: int) -> tuple[torch.Tensor, ...]:
    """Return pairs in order of their experts, each expert's padded to whole tiles of `block` rows.

    Beside them, the expert of each tile, and the number of rows of all tiles.
    """
    flat = ids.flatten()
    padded = (flat.bincount(minlength=experts) + block - 1) // block * block
    rows = torch.full((int(padded.sum()),), flat.numel(), device=ids.device)
    firsts = padded.cumsum(0) - padded
    for expert in range(experts):
        own = (flat == expert).nonzero()[:, 0]
        rows[firsts[expert] : firsts[expert] + len(own)] = own
    of_tiles = torch.arange(experts, device=ids.device).repeat_interleave(padded // block)
    return rows.int(), of_tiles.int(), padded.sum()[None].int()


def layer(
    x: torch.Tensor,
    weights: Weights,
    routed: tuple[torch.Tensor, torch.Tensor],
    gate: Callable[[torch.Tensor], torch.Tensor] | None,
) -> Callable[[], torch.Tensor]:
    """Return a call that computes a layer of experts, and that a CUDA graph can record.

    Parameters
    ----------
    x : torch.Tensor
        ``[tokens, hidden]``, bfloat16.
    weights : dict[str, torch.Tensor]
        ``up`` ``[experts, 2 * between, hidden]``, ``down`` ``[experts, hidden, between]``, and
        ``up_bias`` and ``down_bias`` where there are any.
    routed : tuple[torch.Tensor, torch.Tensor]
        The shares and the experts of tokens, ``[tokens, chosen]``.
    gate : Callable or None
        What stands between the two matmuls where it is not SiLU's gate.
    """
    import triton.language as tl
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as tiles
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_kernels as kernels

    shares, ids = routed[0].float(), routed[1].int()
    (tokens, chosen), up, down = ids.shape, weights["up"], weights["down"]
    shapes = (tuple(up.shape), tuple(down.shape))
    config, (own, _) = tiles.try_get_optimal_moe_config(
        *shapes, chosen, None, tokens, return_down_config=True
    )
    own = {name: value for name, value in (own or config).items() if name != "USE_TMA"}
    table = tiles_of(ids, config["BLOCK_SIZE_M"], len(up))
    common = {"compute_type": tl.bfloat16, "use_fp8_w8a8": False, "use_int8_w8a8": False}
    common |= {"use_int8_w8a16": False, "use_int4_w4a16": False, "per_channel_quant": False}

    def product(a: Any, name: str, to: Any, is_weighed: bool, each: int, config: Any) -> None:
        bias = weights.get(f"{name}_bias")
        given = (a, weights[name], bias, to, None, None, None, shares, ids, *table)
        kernels.invoke_fused_moe_kernel(
            *given, is_weighed, each, config, filter_expert=False, **common
        )

    def call() -> torch.Tensor:
        wide, out = x.new_empty(tokens * chosen, up.shape[1]), torch.empty_like(x)
        product(x, "up", wide, False, chosen, config)
        if gate is None:
            narrow = x.new_empty(tokens * chosen, down.shape[2])
            kernels.act_and_mul_triton(wide, narrow, config, ids)
        else:
            narrow = gate(wide)
        parts = x.new_empty(tokens, chosen, x.shape[1])
        product(narrow, "down", parts, True, 1, own)
        kernels.moe_sum_reduce_triton(parts, out, 1.0)
        return out

    return call
