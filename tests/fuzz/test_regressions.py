"""Programs that once went wrong, each as small as it could be made."""

from __future__ import annotations

from typing import Any

import pytest

from relax_fusion.passes import PATTERNS

from . import check
from .check import Setup
from .graph import Graph, Node, Shape, Size, const

F32 = "float32"


def _param(kind: str, *sizes: Size | int, dtype: str = F32) -> Node:
    shape = tuple(const(s) if isinstance(s, int) else s for s in sizes)
    return Node("param", (), shape, dtype, {"kind": kind})


def _node(op: str, args: tuple[int, ...], shape: Shape, dtype: str = F32, **attrs: Any) -> Node:
    return Node(op, args, shape, dtype, attrs)


def _right(graph: Graph, setup: Setup) -> None:
    failures = check.isolate([graph], setup).failures
    assert not failures, str(failures[0])


@pytest.mark.parametrize("k", [12, 17, 24])
@pytest.mark.parametrize("norm", ["layer", "rms after add"])
def test_widths_that_lanes_do_not_divide(k: int, norm: str) -> None:
    """The statistics of all but the first prologue block read beyond the row."""
    rows = (const(17), const(k))
    nodes = [_param("data", 17, k), _param("data", 17, k), _param("gamma", k), _param("data", k)]
    nodes.append(_node("add", (0, 1), rows))
    if norm == "layer":
        nodes.append(_node("layer_norm", (0, 2, 3), rows, axes=(-1,), eps=1e-3))
    else:
        nodes.append(_node("rms_norm", (4, 2), rows, axes=(-1,), eps=1e-3))
    nodes += [_param("weight", k, 16)]
    nodes.append(_node("matmul", (5, 6), (const(17), const(16)), out_dtype=None))
    _right(Graph(tuple(nodes), (7,)), Setup(whole=False))


def _transposed(dtype: str, out_dtype: str | None) -> list[Node]:
    b = Size(1, ("b",))
    wide = (b, const(4))
    return [
        _param("data", b, 8, dtype=dtype),
        _param("weight_nk", 4, 8, dtype=dtype),
        _node("permute_dims", (1,), (const(8), const(4)), dtype, axes=(1, 0)),
        _node("matmul", (0, 2), wide, out_dtype or dtype, out_dtype=out_dtype),
    ]


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("float32", None), ("float16", None), ("float16", "float32")]
)
def test_nt_matmul_of_tvm_is_recognised(dtype: str, out_dtype: str | None) -> None:
    """Comparing the PrimFunc raised an error, and index types then made it differ."""
    graph = Graph(tuple(_transposed(dtype, out_dtype)), (3,), ({"b": 3},))
    setup = Setup(whole=False, nt_first=True)
    found = check.isolate([graph], setup)
    assert not found.failures, str(found.failures[0])
    assert found.passes()["FuseMatmulEpilogue"] == 1


def test_second_run_of_the_passes_meets_their_kernels() -> None:
    """A kernel of three parameters was compared with an NT matmul, which raised an error."""
    graph = Graph(tuple(_transposed("float32", None)), (3,), ({"b": 5},))
    _right(graph, Setup(whole=False))


def test_transpose_read_twice_is_left_to_tvm() -> None:
    """FuseTransposeMatmul raises on a shared transpose where no pass of ours takes the matmul."""
    nodes = _transposed("float32", None)
    nodes.append(_node("negative", (0,), nodes[0].shape))
    nodes.append(_node("matmul", (4, 2), nodes[3].shape, out_dtype=None))
    graph = Graph(tuple(nodes), (3, 5, 2), ({"b": 2},))
    _right(graph, Setup(passes=("FuseAttentionChain",)))


def test_attention_without_a_scale_is_legalised() -> None:
    """The default scale was taken from a dimension as if it were a number."""
    shape = tuple(const(s) for s in (1, 3, 2, 4))
    nodes = [_param("data", 1, 3, 2, 4) for _ in range(3)]
    nodes.append(_node("attention", (0, 1, 2), shape, scale=None, causal=None))
    passes = tuple(p for p in PATTERNS if p != "FuseAttentionChain")
    _right(Graph(tuple(nodes), (3,)), Setup(passes=passes))
