"""What the compiler makes of `attention_halves`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from triton.experimental.gluon.language import NVMMASharedLayout

from relax_fusion.launch.kernel import CompiledKernel
from relax_fusion.triton_bridge.compile import compile_kernels
from relax_fusion.triton_bridge.kernel import KernelOptions, KernelSource
from relax_fusion.triton_bridge.kernels.attention_halves import attention_halves

from .test_attention_groups import EVERYTHING, PLAIN
from .test_code import SIGNS, stack_bytes

NOT_HERE = {"HEAD_DIM", "EVEN_ROWS"}
CASES = {
    "256-keys": (64, 64, {}),
    "512-keys": (128, 64, {}),
    "uneven": (128, 64, {"EVEN_KEYS": False}),
    "80-features": (64, 128, {"V_DIM": 80}),
    "everything": (64, 64, {**EVERYTHING, "EVEN_KEYS": False}),
}


def compiled(keys: int, width: int, changes: dict[str, Any]) -> CompiledKernel:
    constants = {n: v for n, v in PLAIN.items() if n not in NOT_HERE} | changes
    constants["BLOCK_N"] = keys
    layout = NVMMASharedLayout(128, 16, 4)
    pointers = {"mask_ptr": "*i1", "slopes_ptr": "*fp32"}
    maps = {"q": 64, "k": 2 * keys, "v": 2 * keys}
    types = {}
    for name in attention_halves.arg_names:
        types[name] = pointers.get(name, "*fp16") if name.endswith("_ptr") else "i32"
        if name in maps:
            types[name] = f"tensordesc<fp16[1, 1, {maps[name]}, {width}],{layout!r}>"
        if name in constants:
            types[name] = "constexpr"
    aligned = {name for name in types if name.endswith("_ptr") or "stride" in name}
    options = KernelOptions(num_warps=4, dependent_launch=True)
    source = KernelSource(attention_halves, types, constants, frozenset(aligned), 90, options)
    return compile_kernels([source])[0]


@pytest.mark.parametrize("name", CASES)
def test_tiles_are_copied_by_tma_and_sums_stay_in_registers(name: str, tmp_path: Path) -> None:
    keys, width, changes = CASES[name]
    kernel = compiled(keys, width, changes)
    text = kernel.ptx.decode()
    assert len(re.findall(SIGNS["tensor copies"], text)) == 5
    assert re.search(SIGNS["wgmma"], text)
    assert not re.search(SIGNS["mma"], text)
    assert stack_bytes(kernel.image, tmp_path) == 0
    assert kernel.num_warps == 8
    tiles = 2 * 64 * width + 2 * 4 * keys * 2 * width
    assert tiles < kernel.shared_bytes <= tiles + 2 * 64 * (4 * width + 8) + 1024
    assert text.index("griddepcontrol.wait") < text.index("cp.async.bulk")


@pytest.mark.parametrize("name", CASES)
def test_the_tiles_are_asked_for_without_waiting_in_between(name: str) -> None:
    text = compiled(*CASES[name]).ptx.decode()
    begin, end = text.index("mbarrier.init"), text.rindex("cp.async.bulk.tensor")
    # One after each operation on a barrier would be 12; Triton 3.9 has one between copies
    assert len(re.findall(r"bar\.sync", text[begin:end])) <= 5
