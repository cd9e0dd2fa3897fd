"""Workloads that no kernel computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.errors import GraphError
from relax_fusion.estimator import choose
from relax_fusion.hardware import generic_cpu
from relax_fusion.workload import Attention, Heads, NormMatmul, Projection, Rope

MATMUL = NormMatmul(4, 8, (Projection(8, "nk"),), None, "float32", "float32")
HEADS = Attention(1, 2, 2, 4, 2, 8, 8, 1.0, "none", None, "float32", "float32")
ROPE = Rope(8, 16, "float32")
ROPES = [
    (replace(ROPE, head_dim=7), "head_dim is 7, must be even to have pairs"),
    (replace(ROPE, pairing="both"), "pairing is 'both', must be 'halves' or 'neighbours'"),
    (replace(ROPE, rotary_dim=3), "rotary_dim is 3, must be even and at most head_dim=8"),
    (replace(ROPE, rotary_dim=16), "rotary_dim is 16, must be even and at most head_dim=8"),
    (replace(ROPE, rotary_dim=6), "rotary_dim is 6, must divide head_dim=8"),
    (replace(ROPE, period=12), "period is 12, must be whole heads of 8 and divide n=48"),
    (replace(ROPE, period=32), "period is 32, must be whole heads of 8 and divide n=48"),
    (replace(ROPE, period=8), "16 of 8 features are rotated, must be whole heads of 8"),
]


def turned(rope: Rope) -> NormMatmul:
    return replace(MATMUL, outputs=(Projection(48, "nk", (), rope),))


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (3, "3 is no workload"),
        (replace(MATMUL, rows=-1), "rows is -1, must be a DynamicDim or an integer from 0 on"),
        (replace(MATMUL, k=0), "k is 0, must be an integer from 1 on"),
        (replace(MATMUL, outputs=()), "n is 0, must be an integer from 1 on"),
        (replace(MATMUL, outputs=(Projection(0, "nk"), Projection(8, "nk"))), "n of a projection"),
        (replace(MATMUL, outputs=(Projection(8, "qq"),)), "layout is 'qq', must be 'nk' or 'kn'"),
        (
            replace(MATMUL, outputs=(Projection(8, "nk", ("tan",)),)),
            "step is 'tan', must be a number or",
        ),
        (replace(MATMUL, dtype="float99"), "dtype is 'float99', must be of float64, float32"),
        (replace(MATMUL, outputs=(Projection(9, "nk", (), Rope(4, 8, "float32")),)), "whole heads"),
        *((turned(rope), sentence) for rope, sentence in ROPES),
        (replace(HEADS, q_heads=5), "kv_heads is 2, does not divide q_heads=5"),
        (replace(HEADS, kv_heads=0), "kv_heads is 0, must be an integer from 1 on"),
        (replace(HEADS, window=0), "window is 0, must be an integer from 1 on"),
        (replace(HEADS, q_in=(8, 0)), "q_in is .8, 0., must be Heads"),
        (replace(HEADS, q_in=Heads(6, 3)), "q_in: head 6 is read, there are 6"),
        (replace(HEADS, k_in=Heads(6, 0, 6)), "k_in: head 6 is read, there are 6"),
        (replace(HEADS, v_in=Heads(6, 0, 0)), "v_in: step is 0, must be an integer from 1 on"),
        (replace(HEADS, v_in=Heads(6, -1)), "v_in: start is -1, must be an integer from 0 on"),
        (replace(HEADS, v_in=Heads(6), kv_layout="bnsh"), "v is bnsh, heads among others must be"),
    ],
)
def test_workloads_that_no_kernel_computes(work: object, sentence: str) -> None:
    with pytest.raises(GraphError, match=sentence):
        choose(work, generic_cpu(2))
