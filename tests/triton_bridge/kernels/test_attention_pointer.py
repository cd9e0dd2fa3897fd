"""Attention through pointers, and the merging of its parts, in the interpreter against float64."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_fusion.triton_bridge.kernels.attention_core import LOG2_E, Constants, HeadTensor
from relax_fusion.triton_bridge.kernels.attention_pointer import attention_pointer

from ...support.interpreted import Interpreter, Launch
from ...support.slow import sampled
from .attention_code import compiled
from .test_code import NARROW, SIGNS, stack_bytes

SPARE = 3  # keys of a buffer behind the last in use


@dataclass(frozen=True)
class Heads:
    """One attention; the names are those of the workload."""

    batch: int = 2
    q_len: int = 3
    kv_len: int = 37
    heads: int = 4
    group: int = 2
    head_dim: int = 32
    v_dim: int = 32
    causal: str = "none"
    window: int = 0
    softcap: float = 0.0
    bias: str = "none"
    bias_dims: tuple[bool, ...] = (True, True, True, True)
    mask_dims: tuple[bool, ...] | None = None
    alibi: bool = False
    sinks: bool = False
    layout: str = "bsnh"
    splits: int = 1
    block_m: int = 16
    block_n: int = 16

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def shape(self, length: int, heads: int, width: int) -> tuple[int, ...]:
        middle = (length, heads) if self.layout == "bsnh" else (heads, length)
        return (self.batch, *middle, width)

    def tensors(self) -> dict[str, np.ndarray]:
        """Return operands that float16 holds exactly; unused keys and results are NaN."""
        rng = np.random.default_rng(11)
        kv_heads = self.heads // self.group
        full = (self.batch, self.heads, self.q_len, self.kv_len)
        chosen = tuple(n if d else 1 for n, d in zip(full, self.bias_dims, strict=True))
        mask_dims = self.mask_dims or (False,) * 4
        masked = tuple(n if d else 1 for n, d in zip(full, mask_dims, strict=True))
        t = {
            "q": 2 * rng.standard_normal(self.shape(self.q_len, self.heads, self.head_dim)),
            "k": rng.standard_normal(self.shape(self.kv_len + SPARE, kv_heads, self.head_dim)),
            "v": rng.standard_normal(self.shape(self.kv_len + SPARE, kv_heads, self.v_dim)),
            "bias": rng.standard_normal(chosen),
            "mask": (rng.random(masked) < 0.6).astype(np.float64),
            "slopes": 2.0 ** -np.arange(1, self.heads + 1),
            "sinks": rng.standard_normal(self.heads),
        }
        t = {n: v.astype(np.float16).astype(np.float64) for n, v in t.items()}
        for name in ("k", "v"):
            self.by_head(t[name])[:, :, self.kv_len :] = np.nan
        rows = self.batch * self.heads * self.q_len
        t["out"] = np.full(self.shape(self.q_len, self.heads, self.v_dim), np.nan)
        t["parts"] = np.full(rows * self.splits * self.v_dim, np.nan)
        t["lse"] = np.full(rows * self.splits, np.nan)
        return t

    def by_head(self, x: np.ndarray) -> np.ndarray:
        """Return a view ``[batch, head, sequence, feature]``."""
        return x.swapaxes(1, 2) if self.layout == "bsnh" else x

    def visible(self, t: dict[str, np.ndarray]) -> np.ndarray:
        """Return which keys a query sees, ``[batch, heads, q_len, kv_len]``."""
        key, p = np.arange(self.kv_len), self.positions()[:, None]
        seen = np.ones((self.q_len, self.kv_len), bool)
        if self.causal != "none":
            seen &= key <= p
        if self.window:
            seen &= key > p - self.window
        full = (self.batch, self.heads, self.q_len, self.kv_len)
        return np.broadcast_to(seen & (t["mask"] != 0 if self.mask_dims else True), full)

    def positions(self) -> np.ndarray:
        offset = self.kv_len - self.q_len if self.causal == "bottom_right" else 0
        return np.arange(self.q_len) + offset

    def reference(self, t: dict[str, np.ndarray]) -> np.ndarray:
        """Return the result in float64, ``[batch, head, sequence, feature]``."""
        q = self.by_head(t["q"])
        k = self.by_head(t["k"])[:, :, : self.kv_len].repeat(self.group, 1)
        v = self.by_head(t["v"])[:, :, : self.kv_len].repeat(self.group, 1)
        with np.errstate(invalid="ignore", over="ignore"):
            s = self.scale * (q @ k.swapaxes(2, 3))
            if self.softcap:
                s = self.softcap * np.tanh(s / self.softcap)
            if self.bias != "none":
                s = s + t["bias"] if self.bias == "add" else np.minimum(s, t["bias"])
            if self.alibi:
                distance = np.arange(self.kv_len) - self.positions()[:, None]
                s = s + t["slopes"][:, None, None] * distance
            s = np.where(self.visible(t), s, -np.inf)
            if self.sinks:
                sinks = np.broadcast_to(t["sinks"][:, None, None], (*s.shape[:3], 1))
                s = np.concatenate([s, sinks], -1)
            most = s.max(-1, keepdims=True)
            weights = np.exp(s - np.where(most == -np.inf, 0, most))
            total = weights.sum(-1, keepdims=True)
            weights = weights / np.where(total == 0, 1, total)
            return weights[..., : self.kv_len] @ v

    def tensor(self, name: str, t: dict[str, np.ndarray], pointer: Any = None) -> HeadTensor:
        """Return a tensor of `t` as the kernels take it, by its name or with another pointer."""
        x = t[name]
        sizes = zip(x.shape, x.strides, strict=True)
        b, first, second, _ = (s // x.itemsize if n > 1 else 0 for n, s in sizes)
        in_order = name not in ("bias", "mask") and self.layout == "bsnh"
        s, n = (first, second) if in_order else (second, first)
        return HeadTensor(name if pointer is None else pointer, b, s, n)

    def constants(self, **others: Any) -> Constants:
        """Return the constants of the kernels."""
        mask = self.mask_dims
        given = {name: getattr(self, name) for name in Constants._fields if hasattr(self, name)}
        given |= {"bias_keys": self.bias_dims[3], "has_mask": mask is not None}
        given |= {"mask_keys": mask is not None and mask[3], "pdl": False, "stages": 2}
        given["scored"] = self.scale * LOG2_E.value
        return Constants(**{**given, **others})

    def launches(self, t: dict[str, np.ndarray]) -> list[Launch]:
        """Return what computes it."""
        tiles = math.ceil(self.q_len * self.group / self.block_m)
        pairs = self.batch * self.heads // self.group
        c = self.constants(split=self.splits > 1)
        arguments: dict[str, Any] = {"Q_LEN": self.q_len, "KV_LEN": self.kv_len}
        for name in ("q", "k", "v", "bias", "mask", "out"):
            arguments[name] = self.tensor(name, t)
        for name in ("slopes", "sinks", "parts", "lse"):
            arguments[f"{name}_ptr"] = name
        grid: tuple[int, ...] = (pairs, tiles, self.splits)
        first = Launch("attention_pointer", grid, arguments, {"C": c})
        if self.splits == 1:
            return [first]
        names = ("parts_ptr", "lse_ptr", "sinks_ptr", "out", "Q_LEN")
        finish = {**{n: arguments[n] for n in names}, "SPLITS": self.splits}
        grid = (self.batch * self.heads * self.q_len,)
        return [first, Launch("attention_combine", grid, finish, {"C": c._replace(parts=8)})]


def computed(interpreter: Interpreter, case: Heads, t: dict[str, np.ndarray]) -> np.ndarray:
    """Return what the kernels compute, ``[batch, head, sequence, feature]``."""
    dtypes = dict.fromkeys(t, "float16") | dict.fromkeys(("parts", "lse", "slopes"), "float32")
    dtypes |= {"bias": "float32", "mask": "bool"}
    return case.by_head(interpreter(t, dtypes, case.launches(t))["out"])


def check(interpreter: Interpreter, case: Heads, t: dict[str, np.ndarray] | None = None) -> None:
    """Compare with float64: weights are rounded to float16 before the second matmul."""
    t = t or case.tensors()
    got, want = computed(interpreter, case, t), case.reference(t)
    assert np.array_equal(np.isnan(got), np.isnan(want))
    values = np.abs(case.by_head(t["v"])[:, :, : case.kv_len])
    bound = 2.0**-11 * (np.abs(want) + 2 * np.nanmax(values, initial=0, where=np.isfinite(values)))
    assert np.all((np.abs(got - want) <= bound) | np.isnan(want))


def label(case: Heads) -> str:
    default = Heads()
    changed = {k: v for k, v in vars(case).items() if v != getattr(default, k)}
    return "-".join(f"{k}={v}" for k, v in changed.items()) or "plain"


CASES = [
    Heads(),
    Heads(group=1, layout="bnsh", splits=3),
    Heads(group=4, q_len=1, batch=1, splits=3),
    Heads(kv_len=1, q_len=1),
    Heads(kv_len=5, splits=3),
    Heads(heads=6, group=3, q_len=7),
    Heads(head_dim=64, v_dim=64, kv_len=17),
    Heads(head_dim=80, v_dim=80, kv_len=17, splits=3),
    Heads(head_dim=96, v_dim=96, kv_len=17),
    Heads(head_dim=128, v_dim=128, kv_len=17),
    Heads(head_dim=256, v_dim=256, kv_len=17),
    Heads(head_dim=48, v_dim=80, layout="bnsh"),
    Heads(causal="top_left", q_len=21),
    Heads(causal="bottom_right", q_len=21, splits=3),
    Heads(causal="bottom_right", q_len=21, kv_len=9),
    Heads(causal="bottom_right", window=5, q_len=19, kv_len=50),
    Heads(causal="none", window=6, q_len=40, kv_len=33),
    Heads(causal="none", window=6, q_len=40, kv_len=33, splits=3, batch=1),
    Heads(softcap=3.0, causal="top_left"),
    Heads(bias="add"),
    Heads(bias="add", bias_dims=(False, True, False, True), layout="bnsh", splits=3),
    Heads(bias="add", bias_dims=(True, False, True, False)),
    Heads(bias="min"),
    Heads(mask_dims=(True, False, False, True)),
    Heads(mask_dims=(True, True, True, True), sinks=True, splits=3),
    Heads(mask_dims=(False, True, True, False), bias="min"),
    Heads(alibi=True, causal="bottom_right"),
    Heads(sinks=True, causal="top_left"),
]
ALL = Heads(
    causal="bottom_right", window=30, softcap=5.0, bias="add", mask_dims=(True, False, True, True),
    alibi=True, sinks=True, q_len=11,
)  # fmt: skip
MANY = Heads(batch=1, q_len=70, kv_len=150, causal="bottom_right", block_m=64, block_n=64)


@pytest.mark.parametrize("case", [*CASES, ALL, replace(ALL, splits=3)], ids=label)
def test_against_float64(interpreter: Interpreter, case: Heads) -> None:
    check(interpreter, case)


@pytest.mark.parametrize("change", [{}, {"window": 90}, {"splits": 2}, {"alibi": True}], ids=str)
def test_blocks_that_all_rows_see_are_not_masked(interpreter: Interpreter, change: dict) -> None:
    check(interpreter, replace(MANY, **change))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_that_sees_no_key_gives_zeros(
    interpreter: Interpreter, splits: int, sinks: bool
) -> None:
    case = Heads(bias="add", mask_dims=(True,) * 4, splits=splits, sinks=sinks)
    t = case.tensors()
    t["mask"][0, 1, 2] = 0
    t["bias"][1, 2, 0] = -np.inf
    got = computed(interpreter, case, t)
    assert not got[0, 1, 2].any() and not got[1, 2, 0].any()
    check(interpreter, case, t)


@pytest.mark.parametrize(("splits", "bias"), [(1, "none"), (3, "none"), (1, "min"), (1, "add")])
def test_nan_stays_where_it_is_seen(interpreter: Interpreter, splits: int, bias: str) -> None:
    case = Heads(q_len=5, causal="bottom_right", splits=splits, bias=bias, sinks=True)
    t = case.tensors()
    case.by_head(t["q"])[0, 3, 2] = np.nan
    case.by_head(t["k"])[1, 0, case.kv_len - 2] = np.nan  # the last two queries see it
    want = np.zeros((2, 4, 5, 1), bool)
    want[0, 3, 2] = want[1, :2, 3:] = True
    got = computed(interpreter, case, t)
    assert np.array_equal(np.isnan(got), np.broadcast_to(want, got.shape))


def test_scores_of_any_size(interpreter: Interpreter) -> None:
    case = Heads(softcap=2.0, splits=3)
    t = case.tensors()
    t["q"] *= 1000
    check(interpreter, case, t)
    check(interpreter, replace(case, softcap=0.0), t)


CODE = Heads(heads=32, group=4, head_dim=128, v_dim=128, q_len=1, kv_len=64, batch=1)
COMPILED = {  # case, keys of a block, stages, warps, architecture, and what multiplies
    "decode": (replace(CODE, splits=2), 64, 4, 4, 90, "mma"),
    "decode-64": (replace(CODE, splits=2, group=1, head_dim=64, v_dim=64), 64, 4, 4, 80, "mma"),
    "decode-80": (replace(CODE, splits=2, head_dim=80, v_dim=80), 64, 3, 4, 89, "mma"),
    "prefill": (replace(CODE, causal="bottom_right", block_m=128), 64, 2, 8, 90, "wgmma"),
    "prefill-sm80": (replace(CODE, causal="bottom_right", block_m=64), 64, 2, 8, 80, "mma"),
}


@pytest.mark.parametrize("name", sampled(COMPILED))
def test_copies_are_wide_and_nothing_is_spilled(name: str, tmp_path: Path) -> None:
    case, block_n, stages, warps, arch, multiplied = COMPILED[name]
    constants = case.constants(block_n=block_n, stages=stages, split=case.splits > 1)
    kernel = compiled(attention_pointer, constants, warps, arch)
    text = kernel.ptx.decode()
    assert re.search(SIGNS["copies"], text) and not re.search(NARROW["copies"], text)
    assert re.search(SIGNS[multiplied], text)
    # One value may wait there until the loop is over: ptxas leaves registers to further blocks
    assert stack_bytes(kernel.image, tmp_path) <= 8


def test_a_bound_lets_nan_through() -> None:  # numpy's minimum does anyway: see the code
    kernel = compiled(attention_pointer, replace(CODE, bias="min").constants())
    assert b"min.NaN.f32" in kernel.ptx
