"""What the compiler makes of `attention_groups`.

It is in Gluon, which Triton's interpreter does not run; its numbers are checked on a GPU.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from relax_fusion.launch.kernel import CompiledKernel
from relax_fusion.triton_bridge.compile import compile_kernels
from relax_fusion.triton_bridge.kernel import KernelOptions, KernelSource
from relax_fusion.triton_bridge.kernels.attention_fragments import tile_widths
from relax_fusion.triton_bridge.kernels.attention_groups import attention_groups

from .test_code import SIGNS, stack_bytes

PLAIN = {"GROUP": 1, "HEAD_DIM": 64, "V_DIM": 64, "SCALE": 0.125, "SOFTCAP": 0.0, "SINKS": False}
PLAIN |= {"CAUSAL": "none", "WINDOW": 0, "BIAS": "none", "BIAS_KEYS": True, "ALIBI": False}
PLAIN |= {"HAS_MASK": False, "MASK_KEYS": True, "EVEN_ROWS": True, "EVEN_KEYS": True, "PDL": True}
EVERYTHING = {"GROUP": 4, "CAUSAL": "bottom_right", "WINDOW": 90, "SOFTCAP": 30.0, "BIAS": "add"}
EVERYTHING |= {"HAS_MASK": True, "ALIBI": True, "SINKS": True}
UNEVEN = {"EVEN_ROWS": False, "EVEN_KEYS": False}

CASES = {
    "256-keys": (16, 64, 4, {}),
    "512-keys": (16, 64, 8, {}),
    "32-rows": (32, 64, 4, UNEVEN),
    "32-rows-512-keys": (32, 64, 8, {}),
    "80-features": (16, 64, 4, {"HEAD_DIM": 80, "V_DIM": 80}),
    "128-features": (16, 32, 8, {"HEAD_DIM": 128, "V_DIM": 128}),
    "16-warps": (16, 16, 16, UNEVEN),
    "everything": (16, 64, 4, {**UNEVEN, **EVERYTHING}),
}


def compiled(rows: int, keys: int, groups: int, changes: dict[str, Any]) -> CompiledKernel:
    """Compile for tensors ``[batch, sequence, heads, features]`` of 8 heads."""
    constants = {**PLAIN, **changes, "BLOCK_M": rows, "BLOCK_N": keys, "GROUPS": groups}
    for name, width in (("q", "HEAD_DIM"), ("k", "HEAD_DIM"), ("v", "V_DIM")):
        constants[f"{name}_stride_s"] = 8 * constants[width]
    pointers = {"mask_ptr": "*i1", "slopes_ptr": "*fp32"}
    types = {}
    for name in attention_groups.arg_names:
        kind = pointers.get(name, "*fp16") if name.endswith("_ptr") else "i32"
        types[name] = "constexpr" if name in constants else kind
    aligned = {name for name in types if name.endswith("_ptr") or "stride" in name}
    source = KernelSource(
        attention_groups,
        types,
        constants,
        frozenset(aligned - constants.keys()),
        90,
        KernelOptions(num_warps=groups, dependent_launch=True),
    )
    return compile_kernels([source])[0]


@pytest.mark.parametrize("name", CASES)
def test_operands_are_loaded_16_bytes_at_a_time_into_registers(name: str, tmp_path: Path) -> None:
    rows, keys, groups, changes = CASES[name]
    kernel = compiled(rows, keys, groups, changes)
    text = kernel.ptx.decode()
    width = {**PLAIN, **changes}["HEAD_DIM"]
    low = tile_widths(width)[0]
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
