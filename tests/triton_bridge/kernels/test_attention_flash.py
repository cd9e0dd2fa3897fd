"""attention_flash on numpy arrays against float64, and what the compiler makes of it."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_fusion.launch.kernel import CompiledKernel
from relax_fusion.triton_bridge.kernels.attention_core import Constants
from relax_fusion.triton_bridge.kernels.attention_flash import attention_flash
from relax_fusion.triton_bridge.kernels.attention_flash_scores import late_scale

from ...support.slow import sampled
from .attention_code import compiled as compile_one
from .gluon_on_cpu import Map, Pointer, launch, values
from .test_attention_pointer import Heads
from .test_code import CUOBJDUMP

NVDISASM = CUOBJDUMP.with_name("nvdisasm")


@dataclass(frozen=True)
class Flash(Heads):
    """One attention, and how it is launched."""

    head_dim: int = 16
    v_dim: int = 16
    block_n: int = 32
    stages: int = 2
    q_stages: int = 2
    section: int = 8
    programs: int = 3
    bias_tiles: bool = False

    def tensors(self) -> dict[str, np.ndarray]:
        t = super().tensors()
        return {**t, "bias": t["bias"].astype(np.float16).astype(t["bias"].dtype)}

    def arguments(self, t: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the arguments of a launch, which leaves its result in ``t["out"]``."""
        arguments: dict[str, Any] = {}
        for name, rows in (("q", 64), ("k", self.block_n), ("v", self.block_n)):
            x = self.by_head(t[name])[:, :, : self.kv_len if name != "q" else None]
            width = 1 << (x.shape[3] - 1).bit_length()
            arguments[name] = Map(x.astype(np.float16), (1, 1, rows, width))
        types = {"bias": np.float32, "mask": bool, "slopes": np.float32, "sinks": np.float16}
        pointers = {n: Pointer(t[n].astype(dtype).ravel()) for n, dtype in types.items()}
        if self.bias_tiles:
            pointers["bias"] = Map(t["bias"].astype(np.float16), (1, 1, 64, self.block_n))
        sizes = {"BATCH": self.batch, "Q_LEN": self.q_len, "KV_LEN": self.kv_len}
        return {
            **arguments,
            **{n: self.tensor(n, t, pointers[n]) for n in ("bias", "mask")},
            **{f"{n}_ptr": pointers[n] for n in ("slopes", "sinks")},
            **{n: values(size) for n, size in sizes.items()},
            "out": self.tensor("out", t, Pointer(t["out"].ravel())),
            "C": self.constants(),
        }

    def constants(self, **others: Any) -> Constants:
        """Return the constants of a launch, with the number of stages and the late scale."""
        return late_scale(super().constants(stages=self.stages, **others))


def check(case: Flash, t: dict[str, np.ndarray] | None = None) -> None:
    """Compare with float64: weights are rounded to float16 before the second matmul."""
    t = t or case.tensors()
    launch(attention_flash, case.programs, case.arguments(t))
    got, want = case.by_head(t["out"]), case.reference(t)
    assert np.array_equal(np.isnan(got), np.isnan(want))
    size = np.nanmax(np.abs(case.by_head(t["v"])[:, :, : case.kv_len]), initial=0)
    assert np.all((np.abs(got - want) <= 2.0**-11 * (np.abs(want) + 2 * size)) | np.isnan(want))


def label(case: Flash) -> str:
    changed = {k: v for k, v in vars(case).items() if v != getattr(Flash, k)}
    return "-".join(f"{k}={v}" for k, v in changed.items())


CASES = [
    Flash(q_len=150, kv_len=150, causal="bottom_right"),
    Flash(q_len=129, kv_len=161, stages=3, q_stages=1, block_n=16, programs=1),
    Flash(q_len=64, kv_len=32, heads=6, group=3, layout="bnsh", programs=5),
    Flash(q_len=1, kv_len=1, causal="top_left"),
    Flash(q_len=300, kv_len=77, causal="bottom_right"),
    Flash(q_len=300, kv_len=77, causal="top_left", section=1),
    Flash(q_len=140, kv_len=260, causal="bottom_right", window=40),
    Flash(q_len=300, kv_len=200, causal="top_left", window=7, sinks=True, block_n=16),
    Flash(q_len=140, kv_len=140, window=9, layout="bnsh"),
    Flash(q_len=70, kv_len=90, head_dim=24, v_dim=40, softcap=3.0, causal="top_left"),
    Flash(q_len=130, kv_len=75, bias="add", alibi=True),
    Flash(q_len=130, kv_len=75, bias="min", bias_dims=(True, False, False, True), sinks=True),
    Flash(q_len=66, kv_len=70, bias="add", bias_dims=(False, True, True, False), softcap=2.0),
    Flash(q_len=300, kv_len=150, bias="add", bias_tiles=True, causal="bottom_right", sinks=True),
    Flash(q_len=130, kv_len=75, bias="min", bias_dims=(False, True, True, True), bias_tiles=True),
    Flash(q_len=130, kv_len=75, mask_dims=(True, False, True, True), causal="bottom_right"),
    Flash(q_len=66, kv_len=70, mask_dims=(False, True, False, True), alibi=True),
    Flash(q_len=200, kv_len=70, mask_dims=(True, True, True, False), sinks=True),
]


@pytest.mark.parametrize("case", CASES, ids=label)
def test_numbers(case: Flash) -> None:
    check(case)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_that_sees_no_key_gives_zeros_whatever_the_keys_hold(sinks: bool) -> None:
    case = Flash(q_len=100, kv_len=40, causal="bottom_right", sinks=sinks)
    t = case.tensors()
    check(case, t)
    assert np.all(case.by_head(t["out"])[:, :, :60] == 0)
    hidden = Flash(q_len=70, kv_len=40, mask_dims=(False, False, True, False), sinks=sinks)
    t = hidden.tensors()
    t["mask"][:, :, 3] = 0
    t["k"][...] = t["v"][...] = np.nan
    launch(attention_flash, hidden.programs, hidden.arguments(t))
    rows = hidden.by_head(t["out"])
    assert np.all(rows[:, :, 3] == 0) and np.all(np.isnan(rows[:, :, t["mask"][0, 0, :, 0] != 0]))


def test_an_infinite_bias_hides_a_key_and_nan_stays() -> None:
    case = Flash(q_len=70, kv_len=70, bias="add", batch=1)
    t = case.tensors()
    t["bias"][..., 5] = t["bias"][..., 40:60] = -np.inf
    t["bias"][:, :, 9] = -np.inf
    t["bias"][:, 1, 2, 3] = np.nan
    check(case, t)
    out = case.by_head(t["out"])
    assert np.all(out[:, :, 9] == 0) and np.all(np.isnan(out[0, 1, 2]))
    assert np.isnan(out).sum() == case.v_dim


def compiled(**changed: Any) -> CompiledKernel:
    """Compile for an H200, with the tiles that plans ask for."""
    case = Flash(**changed)
    blocks = {"q": 64, "k": case.block_n, "v": case.block_n}
    maps = {n: (1, 1, rows, case.head_dim) for n, rows in blocks.items()}
    if case.bias_tiles:
        maps["bias.ptr"] = (1, 1, 64, case.block_n)
    return compile_one(attention_flash, case.constants(), maps=maps)


TILES = {
    "128": {"head_dim": 128, "v_dim": 128, "block_n": 128, "causal": "bottom_right"},
    "64": {"head_dim": 64, "v_dim": 64, "block_n": 128, "stages": 3, "mask_dims": (True,) * 4},
    "256": {"head_dim": 256, "v_dim": 256, "block_n": 64, "q_stages": 1, "bias": "add"},
    "bias": {
        "head_dim": 128,
        "v_dim": 128,
        "block_n": 128,
        "q_stages": 1,
        "bias": "add",
        "bias_tiles": True,
    },
}


@pytest.mark.parametrize("tiles", sampled(TILES))
def test_the_main_loop_stays_in_registers(tiles: str, tmp_path: Path) -> None:
    kernel = compiled(**TILES[tiles])
    assert kernel.threads == 384 and kernel.scratch_bytes == 0
    text = kernel.ptx.decode()
    assert "wgmma.mma_async" in text and "cp.async.bulk.tensor" in text
    path = tmp_path / "kernel.cubin"
    path.write_bytes(kernel.image)
    command = [os.fspath(NVDISASM), "-c", os.fspath(path)]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loops = innermost_loops(code, "HGMMA")
    for warp_group in range(2):
        # Without a bias or mask, none in the loop over blocks that all rows see
        body = sorted(loops, key=len)[warp_group].splitlines()
        spilled = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in body)
        assert spilled <= (0 if tiles == "128" else len(body) // 40)


def innermost_loops(code: str, sign: str) -> list[str]:
    """Return the bodies of loops that have `sign`, and no other such loop inside.

    They end with a branch on a condition; others go back from waits that had to be repeated.
    """
    lines = code.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.L\w+):", line))}
    spans = []
    for i, line in enumerate(lines):
        target = re.search(r"@.*BRA.*`\((\.L\w+)\)", line)
        if target and labels[target[1]] < i:
            body = lines[labels[target[1]] : i]
            if any(sign in b for b in body):
                spans.append((labels[target[1]], i))
    inner = [s for s in spans if not any(s != o and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return ["\n".join(lines[a:b]) for a, b in inner]
