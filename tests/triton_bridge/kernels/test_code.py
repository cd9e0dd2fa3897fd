"""What the compiler makes of the kernels, for GPUs that need not be there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from relax_fusion.triton_bridge.kernels.gemv import gemv
from relax_fusion.triton_bridge.kernels.matmul_pointer import matmul_pointer
from relax_fusion.triton_bridge.kernels.row_norm import row_norm
from relax_fusion.triton_bridge.kernels.split_reduce import split_reduce

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
WORK = {"N": 6144, "K": 4096, "GATED": False, "MERGED": "no", "HAS_BIAS": False}
WORK |= {"ACTIVATION": "none", "STEPS": "", "HALF": 0, "ROTATED": 0}
GATED = {"GATED": True, "N": 14336, "ACTIVATION": "silu", "MERGED": "gate_first"}
GEMV = {**WORK, "LAYOUT": "nk", "NORM": "rms", "HAS_BETA": False, "BLOCK_N": 2, "BLOCK_K": 4096}
POINTER = {**WORK, "LAYOUT": "nk", "NORM": "none", "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}
POINTER |= {"SPLIT_K": 1, "GROUP_M": 8, "SWAP": True, "NUM_STAGES": 8}
OLDER = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "SWAP": False, "NUM_STAGES": 4}
REDUCE = {**WORK, "NORM": "rms", "SPLIT_K": 3, "BLOCK_M": 1, "BLOCK_N": 1024}
NORM = {"WIDTH": 4096, "BLOCK": 4096, "ROWS": 1, "NORM": "rms", "HAS_RESIDUAL": True}
NORM |= {"HAS_BETA": False, "STORE_SUM": True, "EARLY": True}
ROPE_ARGUMENTS = {"cos_ptr", "sin_ptr", "positions"}
ROPE = {"HALF": 64, "ROTATED": 5120}

CASES = {
    "gemv": (gemv, GEMV, 4, 90, {"loads"}),
    "gemv-gated": (gemv, {**GEMV, **GATED, "BLOCK_K": 2048}, 4, 90, {"loads"}),
    "gemv-rope": (gemv, {**GEMV, **ROPE}, 4, 90, {"wide loads"}),
    "gemv-unit_offset": (gemv, {**GEMV, "UNIT_OFFSET": True}, 4, 90, {"loads"}),
    "norm": (row_norm, NORM, 8, 90, {"loads"}),
    "pointer": (matmul_pointer, POINTER, 4, 90, {"copies", "wgmma"}),
    "pointer-rms": (matmul_pointer, {**POINTER, "NORM": "rms"}, 4, 90, {"copies", "wgmma"}),
    "pointer-gated": (matmul_pointer, {**POINTER, **GATED}, 4, 90, {"copies", "wgmma"}),
    "pointer-rope": (
        matmul_pointer,
        {**POINTER, **ROPE, "NORM": "rms"},
        4,
        90,
        {"copies", "wgmma"},
    ),
    **{
        f"pointer-kn-{name}": (
            matmul_pointer,
            {**POINTER, "LAYOUT": "kn", **changes},
            4,
            90,
            {"copies", "wgmma"},
        )
        for name, changes in {
            "6144": {},
            "1000": {"N": 1000, "K": 776},
            "rope": ROPE,
            "gated": GATED,
            "tall": {"BLOCK_M": 64, "SWAP": False},
        }.items()
    },
    "pointer-sm80": (matmul_pointer, {**POINTER, **OLDER}, 8, 80, {"copies", "mma"}),
    "pointer-sm89": (matmul_pointer, {**POINTER, **OLDER}, 8, 89, {"copies", "mma"}),
    "reduce": (split_reduce, REDUCE, 4, 90, set()),
    "reduce-rope": (split_reduce, {**REDUCE, **ROPE}, 4, 90, set()),
}
SIGNS = {
    "wide loads": r"ld\.global[^;]*\.v4",
    "loads": r"ld\.global[^;]*\.v4",
    "copies": r"cp\.async\.cg[^;]*0x10",
    "tensor copies": r"cp\.async\.bulk\.tensor",
    "wgmma": r"wgmma\.mma_async",
    "mma": r"mma\.sync",
}
NARROW = {"loads": r"ld\.global(?![^;]*\.v4)", "copies": r"cp\.async\.ca|st\.shared\.b16"}
"""Copies that pass through registers end in stores to shared memory, element by element."""


def compiled(kernel: Any, constants: dict[str, Any], warps: int, arch: int, dtype: str) -> Any:
    """Compile as a launcher would that knows pointers to be aligned to 16 bytes."""
    constants = {"UNIT_OFFSET": False, **constants, "PDL": arch >= 90}
    types = {"M": "i32", "eps": "fp32", "workspace_ptr": "*fp32"}
    if constants.get("HALF"):
        types |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "positions": "i32"}
    else:
        constants |= dict.fromkeys(ROPE_ARGUMENTS & set(kernel.arg_names))
    signature, values, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        else:
            signature[name] = types.get(name, f"*{dtype}")
            if signature[name].startswith("*"):
                aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, aligned)
    target = GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options={"num_warps": warps})


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Return the bytes of stack of a kernel: more than none means that registers were spilled."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [os.fspath(CUOBJDUMP), "-res-usage", os.fspath(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", text)[1])


@pytest.mark.parametrize("name", CASES)
def test_the_code_is_wide_and_stays_in_registers(name: str, tmp_path: Path) -> None:
    kernel, constants, warps, arch, signs = CASES[name]
    result = compiled(kernel, constants, warps, arch, "bf16" if "gated" in name else "fp16")
    text = result.asm["ptx"]
    for sign in signs:
        assert re.search(SIGNS[sign], text), sign
        assert sign not in NARROW or not re.search(NARROW[sign], text), sign
    if "wgmma" in signs:
        assert not re.search(SIGNS["mma"], text)
    assert stack_bytes(result.asm["cubin"], tmp_path) == 0
    assert result.metadata.global_scratch_size == 0
    assert ("griddepcontrol.wait" in text) == (arch >= 90), "it is launched before its time"


@pytest.mark.parametrize("name", ["gemv", "gemv-gated"])
def test_warps_of_a_gemv_meet_once(name: str) -> None:
    kernel, constants, warps, arch, _ = CASES[name]
    text = compiled(kernel, constants, warps, arch, "fp16").asm["ptx"]
    # With all sums in one place: to write them and to read them (Triton 3.9: and to end)
    assert text.count("bar.sync") <= 3
