"""What the graphs of workloads say is said nowhere else: order of operands, flops, references."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import relax_fusion
from relax_fusion.compute import build_prim_func
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.triton_bridge.operands import named_operands
from relax_fusion.workload import DynamicDim, Graph, NormMatmul, Projection
from relax_fusion.workload.graph import Slot, Tensor

from ..support.workloads import inputs

PACKAGE = Path(relax_fusion.__file__).parent
ROOT = PACKAGE.parent
PLACES = [PACKAGE, ROOT / "scripts", ROOT / "benchmarks", ROOT / "tests"]
HERE = (PACKAGE / "workload", ROOT / "tests" / "workload")
# The parameters of single Triton kernels, and what fused functions are compared with: the graphs
# that they replace
OTHERS = (
    "triton_bridge/kernels/",
    "equivalence/",
    "tests/support/reference.py",
    "attention/peers.py",
)
FILES = [
    path
    for place in PLACES
    for path in sorted(place.rglob("*.py"))
    if not any(path.is_relative_to(here) for here in HERE)
    and not any(other in path.as_posix() for other in OTHERS)
]
SIZES = {"rows", "k", "n", "r", "q_len", "kv_len", "head_dim", "v_dim"}
OPERANDS = {
    *("q", "k", "v", "bias", "mask", "slopes", "sinks", "kv_len", "out"),
    *("x", "residual", "gamma", "beta", "w0", "w1", "bias0", "bias1", "cos0", "sin0", "out0"),
}
REFERENCES = {"reference", "unfused"}


def said(source: str) -> Iterator[str]:
    """Yield what a file states that a graph states."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            found = [*_factors(node)]
            if len(SIZES.intersection(found)) > 2 and found[0] in ("2", "4"):
                yield f"line {node.lineno}: flops, {' * '.join(found)}"
        if isinstance(node, ast.Tuple | ast.List):
            names = [e.value for e in node.elts if isinstance(e, ast.Constant)]
            if len(OPERANDS.intersection(n for n in names if isinstance(n, str))) > 4:
                yield f"line {node.lineno}: an order of operands, {names}"
        called = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
        if called == "iter" and ast.unparse(node).startswith("iter(func.params"):
            yield f"line {node.lineno}: parameters are taken one by one"
        if isinstance(node, ast.FunctionDef) and node.name in REFERENCES:
            text = ast.unparse(node)
            if "evaluate(" not in text and "torch" not in text:
                yield f"line {node.lineno}: a reference"


def _factors(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from (*_factors(node.left), *_factors(node.right))
    elif isinstance(node, ast.Constant):
        yield f"{node.value:g}" if isinstance(node.value, float) else str(node.value)
    else:
        yield getattr(node, "attr", getattr(node, "id", ""))


def test_files_are_found() -> None:
    assert len(FILES) > 300


def test_nothing_is_said_twice() -> None:
    assert [
        f"{path.relative_to(ROOT)}: {what}"
        for path in FILES
        for what in said(path.read_text(encoding="utf-8"))
        if "an order of operands" not in what or path.is_relative_to(PACKAGE)
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "flops = 2.0 * (rows * work.k * work.n)",
        "for name in ('q', 'k', 'v', 'bias', 'mask', 'out'): pass",
        "x = next(iter(func.params))",
        "def reference(arrays): return arrays['x'] @ arrays['w0']",
    ],
)
def test_what_is_said_twice_is_found(source: str) -> None:
    assert len(list(said(source))) == 1


class _WithGate(NormMatmul):
    """A projection with one operand more, in front of the others."""

    def _graph(self) -> Graph:
        graph = super()._graph()
        gate = Tensor("gate", (self.n,), "float32")
        return Graph((gate, *graph.tensors), graph.blocks, (Slot("gate", "in"), *graph.slots))


def test_an_operand_more_is_one_everywhere() -> None:
    work = _WithGate(DynamicDim("n"), 16, (Projection(8, "nk", ("bias",)),), None, *["float32"] * 2)
    func = build_prim_func(work, PlanTable.single(TilePlan(4, 4, 16, family="cpu_tiles")))
    assert [p.name for p in func.params] == ["gate", "x", "w0", "bias0_0", "out0"]
    given = named_operands(work, list(func.params)[:-1])
    assert given["gate"].name == "gate" and given["x"].name == "x"
    assert inputs(work, {"rows": 3})["gate"].shape == (8,)
    assert work.bytes(rows=3)["gate"] == 0  # read by no statement
