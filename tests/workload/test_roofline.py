"""Operations and bytes against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.errors import GraphError
from relax_fusion.workload import (
    Attention,
    DynamicDim,
    GatedFFN,
    Heads,
    Norm,
    NormMatmul,
    Packed,
    Projection,
    Rope,
)
from relax_fusion.workload.builder import GraphBuilder
from relax_fusion.workload.roofline import distinct_bytes, flops, is_contraction, matmul_flops
from relax_fusion.workload.values import Axis

from ..support.matmul_chains import TwoMatmuls
from .test_reference import EVERYTHING, q4_gate_up, three_matmuls

ROWS = DynamicDim("rows")
HALF = ("float16", "float16")


def test_llama_gate_up_on_four_bits() -> None:
    graph, sizes = q4_gate_up(4096, 14336), {"rows": 3}
    assert matmul_flops(graph, sizes) == 2 * 3 * 4096 * 28672
    moved = distinct_bytes(graph, sizes)
    assert moved["w"] == 4096 * 28672 // 2 + 4096 * 28672 // 32 * 2
    assert moved == {"x": 3 * 8192, "gamma": 8192, "w": moved["w"], "y": 3 * 28672}


@pytest.mark.parametrize(
    ("form", "scales"),
    [
        (Packed(8, -1, 0, "int8", "", number="int8"), 0),
        (Packed(8, -1, 0, "int8", "float32", number="int8", lines=-1), 4),
        (Packed(8, -1, 0, "int8", number="int8"), 2 * 512),
        (Packed(8, 128, 0, "int8", "float32", number="int8", lines=128), 4 * 8 * 4),
    ],
)
def test_bytes_and_their_scales(form: Packed, scales: int) -> None:
    work = NormMatmul(ROWS, 1024, (Projection(512, "nk", packed=form),), None, *HALF)
    read = distinct_bytes(work.graph, {"rows": 1})
    assert read["w0"] == 512 * 1024 + scales


def test_all_operations_are_counted() -> None:
    # squares 2, norm 3 and 3 for each row, matmuls 2, silu 3 and a product
    rows, k, n = 3, 64, 48
    assert flops(q4_gate_up(), {"rows": rows}) == rows * (2 * k + 5 * k + 4 * k * n + 4 * n)


def test_attention_reads_the_prefix_of_its_cache() -> None:
    sizes = {"q_len": 3, "kv_len": 7, "kv_capacity": 100}
    moved = EVERYTHING.bytes(**sizes)
    assert EVERYTHING.flops(**sizes) == 2 * 2 * 6 * 3 * 7 * (8 + 4)
    assert moved == {
        "q": 2 * 6 * 3 * 8 * 4,
        "k": 2 * 7 * 2 * 8 * 4,
        "v": 2 * 7 * 2 * 4 * 4,
        "bias": 2 * 3 * 7 * 4,
        "mask": 2 * 7,
        "slopes": 6 * 4,
        "sinks": 6 * 4,
        "out": 2 * 3 * 6 * 4 * 4,
    }


def test_of_a_merged_tensor_the_heads_that_are_read_count() -> None:
    work = Attention(2, 3, 5, 6, 2, 8, 4, 1.0, "none", None, *HALF)
    parts = [
        (Heads(10, 0), Heads(10, 6), Heads(10, 8)),
        (Heads(18, 0, 3), Heads(16, 1, 7), Heads(6, 2, 3)),
        (None, None, Heads(9, 5)),
    ]
    for q, k, v in parts:
        assert replace(work, q_in=q, k_in=k, v_in=v).bytes() == work.bytes()


def test_elements_between_those_that_are_read_do_not_count() -> None:
    g, i = GraphBuilder(), Axis("i", 5)
    x, y = g.input("x", (40,), "float32"), g.input("y", (40,), "float32")
    g.output(g.map("z", (i,), x[i * 4 + 2] + x[i * 6 + 4] + y[i * 4] + y[i * 4 + 1], "float32"))
    assert distinct_bytes(g.graph(), {}) == {"x": 4 * 14, "y": 4 * 18, "z": 4 * 5}


def test_equal_lengths_have_one_name() -> None:
    length = DynamicDim("s")
    work = Attention(1, length, length, 2, 2, 8, 8, 1.0, "top_left", None, *HALF)
    assert work.graph.dims == ("q_len",)
    assert work.flops(q_len=5) == 2 * 2 * 5 * 5 * 16


def test_angles_are_read_once_for_all_sequences() -> None:
    rope = Rope(16, 32, "float32", 8)
    work = NormMatmul(ROWS, 64, (Projection(48, "nk", (), rope),), None, *HALF)
    assert work.bytes(rows=24)["cos0"] == 8 * 16 * 4
    assert work.bytes(rows=2)["cos0"] == 2 * 16 * 4


def test_outputs_of_a_norm_are_written() -> None:
    norm = Norm("layer", 1e-5, True, residual=True, returns_sum=True, returns_norm=True)
    work = NormMatmul(ROWS, 64, (Projection(48, "kn", ("residual",)),), norm, *HALF)
    row = 2 * 64
    wide = {"x": 5 * row, "residual": 5 * row, "x_sum": 5 * row, "x_norm": 5 * row}
    small = {"gamma": row, "beta": row, "w0": 48 * row}
    assert work.bytes(rows=5) == {**wide, **small, "residual0_0": 480, "out0": 480}
    assert work.flops(rows=5) == 2 * 5 * 64 * 48


def test_gated_and_chains() -> None:
    gated = GatedFFN(ROWS, 64, 48, "nk", True, True, "silu", None, *HALF, bias=True)
    for work in (gated, replace(gated, merged=False)):
        assert work.flops(rows=3) == 4 * 3 * 64 * 48
        assert sum(work.bytes(rows=3).values()) == 2 * (3 * 64 + 96 * 64 + 96 + 3 * 48)
    chain = TwoMatmuls(ROWS, 64, 8, 48, ("nk", "nk"), (), (), *HALF, DynamicDim("b")).chain
    assert chain.flops(rows=3, batch=5) == 5 * 2 * 3 * 8 * (64 + 48)
    assert matmul_flops(three_matmuls(), {"rows": 3}) == 2 * 3 * (32 + 24 + 30)


def test_contractions_are_sums_of_products_along_different_axes() -> None:
    work = NormMatmul(ROWS, 64, (Projection(48, "nk"),), Norm("rms", 1e-5), *HALF)
    found = {b.out: is_contraction(b) for b in work.graph.blocks}
    assert found == {"square_sum": False, "x_norm": False, "acc0": True, "out0": False}


def test_a_size_that_is_missing_is_named() -> None:
    work = NormMatmul(ROWS, 8, (Projection(4, "nk"),), None, "float32", "float32")
    with pytest.raises(GraphError, match="the size of rows is missing"):
        work.flops()
