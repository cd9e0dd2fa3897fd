"""What the compiler makes of the kernels, for GPUs that need not be there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton

from relax_fusion.triton_bridge.kernel import CONSTEXPR, KernelOptions, KernelSource
from relax_fusion.triton_bridge.kernels.gemv import gemv
from relax_fusion.triton_bridge.kernels.matmul_pointer import matmul_pointer
from relax_fusion.triton_bridge.kernels.products import Constants, Form, Tensors
from relax_fusion.triton_bridge.kernels.row_norm import row_norm
from relax_fusion.triton_bridge.kernels.split_reduce import split_reduce

from ...support.slow import sampled

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
FORM = Form(96, 6144, "nk")
NARROW_FORM = Form(16, 1024, "nk")
GATED = FORM._replace(n=14336, gated=True, activation="silu", merged="gate_first")
KN = FORM._replace(layout="kn")
ROPE = {"half": 64, "rotated": (5120, 0, 128, 128, 128)}
PART = {"half": 16, "rotated": (256, 384, 128, 32, 32)}
NEIGHBOURS = {"half": 1, "rotated": (5120, 0, 128, 64, 32)}
GEMV = Constants(4096, 1, 2, 4096, True, norm="rms")
POINTER = Constants(4096, 16, 64, 64, True, swap=True, stages=8)
OLDER = POINTER._replace(block_m=128, block_n=128, block_k=32, swap=False, stages=4, pdl=False)
REDUCE = Constants(4096, 1, 1024, 0, True, norm="rms", split_k=3)
NORM = {"WIDTH": 4096, "BLOCK": 4096, "ROWS": 1, "NORM": "rms", "HAS_RESIDUAL": True, "PDL": True}
NORM |= {"HAS_BETA": False, "STORE_SUM": True, "EARLY": True, "UNIT_OFFSET": False}
QKV = [FORM._replace(half=64, rotated=(6144, 0, 128, 128, 128))]
QKV += [NARROW_FORM._replace(half=64, rotated=r) for r in ((1024, 0, 128, 128, 128), None)]

CASES = {
    "gemv": (gemv, [FORM], GEMV, 4, {"loads"}),
    "gemv-gated": (gemv, [GATED], GEMV._replace(block_k=2048), 4, {"loads"}),
    "gemv-rope": (gemv, [FORM._replace(**ROPE)], GEMV, 4, {"wide loads"}),
    "gemv-rope-neighbours": (gemv, [FORM._replace(**NEIGHBOURS)], GEMV, 4, {"wide loads"}),
    "gemv-three": (gemv, QKV, GEMV, 4, {"wide loads"}),
    "gemv-unit_offset": (gemv, [FORM], GEMV._replace(unit_offset=True), 4, {"loads"}),
    "norm": (row_norm, [], NORM, 8, {"loads"}),
    "pointer": (matmul_pointer, [FORM], POINTER, 4, {"copies", "wgmma"}),
    "pointer-rms": (matmul_pointer, [FORM], POINTER._replace(norm="rms"), 4, {"copies", "wgmma"}),
    "pointer-gated": (matmul_pointer, [GATED], POINTER, 4, {"copies", "wgmma"}),
    "pointer-two": (matmul_pointer, [NARROW_FORM] * 2, POINTER, 4, {"copies", "wgmma"}),
    "pointer-three": (matmul_pointer, QKV, POINTER, 4, {"copies", "wgmma"}),
    "pointer-rope": (
        *(matmul_pointer, [FORM._replace(**ROPE)], POINTER._replace(norm="rms")),
        *(4, {"copies", "wgmma"}),
    ),
    **{
        f"pointer-kn-{name}": (matmul_pointer, forms, constants, 4, {"copies", "wgmma"})
        for name, (forms, constants) in {
            "6144": ([KN], POINTER),
            "1000": ([KN._replace(n=1000)], POINTER._replace(k=776)),
            "two": ([KN, KN._replace(n=1000)], POINTER),
            "rope": ([KN._replace(**ROPE)], POINTER),
            "rope-neighbours": ([KN._replace(**NEIGHBOURS)], POINTER),
            "gated": ([GATED._replace(layout="kn")], POINTER),
            "tall": ([KN], POINTER._replace(block_m=64, swap=False)),
        }.items()
    },
    "pointer-sm80": (matmul_pointer, [FORM], OLDER, 8, {"copies", "mma"}),
    "pointer-sm89": (matmul_pointer, [FORM], OLDER, 8, {"copies", "mma"}),
    **{
        f"pointer-rope-{name}": (
            *(matmul_pointer, [FORM._replace(**rope)], POINTER, 4),
            {"copies", "wgmma"},
        )
        for name, rope in (("part", PART), ("neighbours", NEIGHBOURS))
    },
    "reduce": (split_reduce, [FORM], REDUCE, 4, set()),
    "reduce-rope": (split_reduce, [FORM._replace(**ROPE)], REDUCE, 4, set()),
    "reduce-three": (split_reduce, QKV, REDUCE, 4, set()),
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


def compiled(
    kernel: Any, forms: list[Form], constants: Any, warps: int, arch: int, dtype: str
) -> Any:
    """Compile as a launcher would that knows pointers to be aligned to 16 bytes."""
    fixed = dict(constants) if isinstance(constants, dict) else {"C": constants}
    fixed |= {f"F{i}": form for i, form in enumerate(forms)}
    types = {}
    for name in kernel.arg_names:
        number = name[1:]
        if name in fixed or (name[0] in "pF" and number.isdigit() and int(number) >= len(forms)):
            types[name] = CONSTEXPR
            fixed.setdefault(name, None)
        elif name[0] == "p" and number.isdigit():
            given = tensors(forms[int(number)], dtype, constants.split_k > 1)
            types |= {f"{name}.{field}": kind or CONSTEXPR for field, kind in given.items()}
            fixed |= {f"{name}.{field}": None for field, kind in given.items() if kind is None}
        else:
            types[name] = {"M": "i32", "eps": "fp32"}.get(name, f"*{dtype}")
    aligned = frozenset(name for name, kind in types.items() if kind.startswith("*"))
    options = KernelOptions(num_warps=warps, dependent_launch=arch >= 90)
    source = KernelSource(kernel, types, fixed, aligned, arch, options)
    return triton.compile(source.ast(), target=source.gpu_target, options={"num_warps": warps})


def tensors(form: Form, dtype: str, split: bool) -> dict[str, str | None]:
    """Return the types of a product's tensors, None for those that it does not have."""
    turned = form.rotated is not None
    return Tensors(
        w=f"*{dtype}",
        up=f"*{dtype}" if form.gated else None,
        bias=None,
        up_bias=None,
        out=f"*{dtype}",
        parts="*fp32" if split else None,
        cos="*fp32" if turned else None,
        sin="*fp32" if turned else None,
        positions="i32" if turned else None,
        operands=None,
    )._asdict()


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Return the bytes of stack of a kernel: more than none means that registers were spilled."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [os.fspath(CUOBJDUMP), "-res-usage", os.fspath(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", text)[1])


@pytest.mark.parametrize("name", sampled(CASES))
def test_the_code_is_wide_and_stays_in_registers(name: str, tmp_path: Path) -> None:
    kernel, forms, constants, warps, signs = CASES[name]
    arch = int(name[-2:]) if "sm8" in name else 90
    result = compiled(kernel, forms, constants, warps, arch, "bf16" if "gated" in name else "fp16")
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
    kernel, forms, constants, warps, _ = CASES[name]
    text = compiled(kernel, forms, constants, warps, 90, "fp16").asm["ptx"]
    # With all sums in one place: to write them and to read them (Triton 3.9: and to end)
    assert text.count("bar.sync") <= 3
