"""Kernels that unpack weights for few rows: numbers without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relax_fusion.dlight_rules.tensor_cores.contraction import emit
from relax_fusion.estimator import candidates
from relax_fusion.estimator.families.few_rows.packed import PackedPlan
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload import GatedFFN, Norm, NormMatmul, Packed, Projection, Rope
from relax_fusion.workload.reference import evaluate, numpy_dtype

from ..support.slow import quick_if
from .generic_on_cpu import Launches, of_few_rows
from .nodes import Node

H200 = device_of(make_target("h200"))
Q4, Q8 = Packed(4, 32, 7), Packed(8, 32, 127)
RMS = Norm("rms", 1e-5)
HALF = ("float16", "float16")

PLAIN = NormMatmul(1, 256, (Projection(64, "nk", ("residual",), packed=Q4),), None, *HALF)
NORMED = replace(PLAIN, outputs=(Projection(40, "nk", ("bias",), packed=Q4),), norm=RMS)
TWO = (Projection(32, "nk", packed=Q4), Projection(48, "nk", ("bias",), packed=Q4))
ROPED = (Projection(64, "nk", rope=Rope(16, 32, "float32"), packed=Q4),)
GATED = GatedFFN(1, 256, 48, "nk", True, True, "silu", RMS, *HALF, packed=Q4)
COLUMNS = Packed(4, 32, 7, axis=-2)
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
TENSOR = Packed(8, -1, 0, E4M3, "float32", number=E4M3, lines=-1)
BYTES = {
    "e4m3": Packed(8, -1, 0, E4M3, "", number=E4M3),
    "e4m3 of a tensor": TENSOR,
    "e4m3 of blocks": Packed(8, 96, 0, E4M3, "float32", number=E4M3, lines=48),
    "e4m3 of groups": Packed(8, 32, 0, E4M3, number=E4M3),
    "e4m3 in words": replace(TENSOR, word="uint32"),
    "e5m2": Packed(8, -1, 0, E5M2, number=E5M2),
    "int8": Packed(8, -1, 0, "int8", number="int8"),
    "int8 with a limit": Packed(8, -1, 0, "int8", number="int8", lines=-1, limit=1.0),
    "int8 with a zero": Packed(8, 64, -3, "int8", "float32", number="int8"),
    "uint8": Packed(8, -1, 128, "uint8"),
}
WORKS = {
    "plain": PLAIN,
    "norm": NORMED,
    "norm of a sum": replace(NORMED, norm=replace(RMS, residual=True)),
    "two": replace(NORMED, outputs=TWO),
    "rope": replace(NORMED, outputs=ROPED),
    "rope and plain": replace(NORMED, outputs=(*ROPED, *TWO)),
    "gated": GATED,
    "gated apart": replace(GATED, merged=False),
    "eight bits": replace(PLAIN, outputs=(Projection(64, "nk", packed=Q8),)),
    "along columns": replace(PLAIN, outputs=(Projection(64, "kn", packed=COLUMNS),)),
    "odd k": replace(NORMED, k=200),
    **{n: replace(PLAIN, outputs=(Projection(64, "nk", packed=f),)) for n, f in BYTES.items()},
    "e4m3 gated": replace(GATED, packed=BYTES["e4m3 of blocks"]),
    "e4m3 and odd k": replace(NORMED, k=200, outputs=(Projection(40, "nk", packed=TENSOR),)),
}
QUICK = [
    ("gated", 3),
    ("rope and plain", 3),
    ("norm of a sum", 16),
    ("eight bits", 16),
    ("e4m3 gated", 3),
    ("e5m2", 3),
]
"""Codes of three kinds, each height, and all that is in front of the products or behind them."""


def plans(work: Any, few: bool) -> list[PackedPlan]:
    """Return a narrow plan of each height, and for few rows some that keep a row.

    Those that stream are one if they are to be `few`: where tiles are fewer than multiprocessors,
    all numbers of blocks in one do the same.
    """
    found = [p for p in candidates(work, H200, "tir") if isinstance(p, PackedPlan)]
    found.sort(key=lambda p: (p.block_n, p.num_warps))
    blocks = bool if few else int
    chosen = {(p.block_m, p.keeps_row, blocks(p.residents)): p for p in reversed(found)}
    return [p for p in chosen.values() if work.rows <= 3 or not p.keeps_row]


def arrays(work: Any) -> dict[str, np.ndarray]:
    """Return random operands."""
    rng, found = np.random.default_rng(3), {}
    for o in work.graph.inputs:
        if o.name in ("w0", "w1"):
            kind, number = numpy_dtype(o.dtype), work.graph[o.name].format.number
            codes = rng.integers(0, 256, (*o.shape, kind.itemsize), "uint8")
            if number == E4M3:
                codes[codes & 0x7F == 0x7F] = 0x7E
            if number == E5M2:  # none that float16 cannot add up
                codes &= 0xBF
            found[o.name] = codes.view(kind)[..., 0]
        else:
            scale = 0.02 if o.name.endswith("scale") else 1
            found[o.name] = (rng.standard_normal(o.shape) * scale).astype(numpy_dtype(o.dtype))
    return found


def in_front(work: Any, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what the kernel in front of the products makes, if there is one."""
    x = given["x"]
    if work.norm is not None:
        wide = x.astype("float64") + (given["residual"] if work.norm.residual else 0)
        wide = wide.astype("float16").astype("float64")
        x = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + work.norm.eps) * given["gamma"]
        x = x.astype("float16")
    return {"x_norm": x}


@pytest.mark.parametrize(
    ("name", "rows"),
    # How a byte becomes a number does not depend on the height: two of e4m3 have both
    quick_if(
        QUICK.__contains__,
        [(name, rows) for name in WORKS for rows in (3, 16) if rows == 3 or name not in BYTES],
    ),
)
def test_numbers(name: str, rows: int) -> None:
    work = replace(WORKS[name], rows=rows)
    given, chosen = arrays(work), plans(work, few=(name, rows) in QUICK)
    assert chosen
    for plan in chosen:
        func = emit(work, plan, make_target("h200"))
        wanted = evaluate(work.graph, given)
        outs = {o.name: np.full(o.shape, np.nan, "float16") for o in work.graph.outputs}
        every = given | outs | in_front(work, given)
        tensors = {n: a.copy().reshape(-1) for n, a in every.items()}
        Launches(tensors, chosen=of_few_rows).run(Node(func.body))
        for out in (name for name in outs if name != "x_sum"):
            got = tensors[out].reshape(wanted[out].shape).astype("float64")
            scale = np.abs(wanted[out]).max()
            np.testing.assert_allclose(got, wanted[out], atol=2e-3 * scale, err_msg=plan.text)
