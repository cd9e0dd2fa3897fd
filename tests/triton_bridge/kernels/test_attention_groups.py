"""What the compiler makes of `attention_groups`.

It is in Gluon, which Triton's interpreter does not run; its numbers are checked on a GPU.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_fusion.launch.kernel import CompiledKernel
from relax_fusion.triton_bridge.kernels.attention_fragments import tile_widths
from relax_fusion.triton_bridge.kernels.attention_groups import attention_groups

from ...support.slow import sampled
from .attention_code import compiled as compile_one
from .test_attention_pointer import Heads
from .test_code import SIGNS, stack_bytes

PLAIN = Heads(heads=8, group=1, head_dim=64, v_dim=64)
EVERYTHING = {"group": 4, "causal": "bottom_right", "window": 90, "softcap": 30.0, "bias": "add"}
EVERYTHING |= {"mask_dims": (True,) * 4, "alibi": True, "sinks": True}

CASES = {  # rows, keys, groups, changes, and whether tiles are whole
    "256-keys": (16, 64, 4, {}, True),
    "512-keys": (16, 64, 8, {}, True),
    "32-rows": (32, 64, 4, {}, False),
    "32-rows-512-keys": (32, 64, 8, {}, True),
    "80-features": (16, 64, 4, {"head_dim": 80, "v_dim": 80}, True),
    "128-features": (16, 32, 8, {"head_dim": 128, "v_dim": 128}, True),
    "16-warps": (16, 16, 16, {}, False),
    "everything": (16, 64, 4, EVERYTHING, False),
}


def compiled(
    rows: int, keys: int, groups: int, changes: dict[str, Any], even: bool
) -> CompiledKernel:
    """Compile for tensors ``[batch, sequence, heads, features]`` of 8 heads."""
    case = replace(PLAIN, block_m=rows, block_n=keys, **changes)
    constants = case.constants(groups=groups, even_rows=even, even_keys=even)
    widths = {"q": case.head_dim, "k": case.head_dim, "v": case.v_dim}
    fixed = {f"{name}.s": 8 * width for name, width in widths.items()}
    return compile_one(attention_groups, constants, groups, fixed=fixed)


@pytest.mark.parametrize("name", sampled(CASES))
def test_operands_are_loaded_16_bytes_at_a_time_into_registers(name: str, tmp_path: Path) -> None:
    rows, keys, _, changes, _ = CASES[name]
    kernel = compiled(*CASES[name])
    text = kernel.ptx.decode()
    low = tile_widths(replace(PLAIN, **changes).head_dim)[0]
    loads = (2 * keys + rows) * low // (32 * 8)  # keys, values and queries of a warp
    assert len(re.findall(SIGNS["wide loads"], text)) >= loads
    assert re.search(SIGNS["mma"], text)
    assert "ldmatrix" not in text
    assert stack_bytes(kernel.image, tmp_path) == 0
    assert text.index("griddepcontrol.wait") < text.index("ld.global")


@pytest.mark.parametrize("name", CASES)
def test_there_are_two_barriers_and_all_loads_are_in_front_of_the_first(name: str) -> None:
    kernel = compiled(*CASES[name])
    text = kernel.ptx.decode()
    assert len(re.findall(r"bar\.sync", text)) == 2
    product = text.index("mma.sync")
    wide = [m.start() for m in re.finditer(SIGNS["wide loads"], text)]
    barrier = text.index("bar.sync")
    assert max(wide) < barrier < product
