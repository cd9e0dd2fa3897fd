"""FuseAttentionChain on ONNX graphs, as `relax.frontend.onnx` imports them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import tvm
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from tvm.relax.frontend.onnx import from_onnx

from relax_fusion import Attention

from ..support.attention_chains import fused, thirds
from ..support.chains import calls

BATCH, HEADS, DIM, LENGTH = 2, 4, 8, 6
FLOAT, BOOL, INT = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
BASE = Attention(
    batch=BATCH,
    q_len=LENGTH,
    kv_len=LENGTH,
    q_heads=HEADS,
    kv_heads=HEADS,
    head_dim=DIM,
    v_dim=DIM,
    scale=0.5,
    causal="none",
    bias_dims=None,
    dtype="float32",
    out_dtype="float32",
)


def node(op: str, inputs: str, output: str, **attributes: object) -> NodeProto:
    """Return one node, whose inputs are names with spaces between them."""
    domain = {"domain": "com.microsoft"} if attributes.pop("contributed", False) else {}
    names = [name if name != "-" else "" for name in inputs.split()]
    return helper.make_node(op, names, [output], **domain, **attributes)


HEADS_FIRST = [
    node("Reshape", f"{x} split", f"{x}0")
    if step == 0
    else node("Transpose", f"{x}0", f"{x}1", perm=[0, 2, 1, 3])
    for x in "qkv"
    for step in range(2)
]
PRODUCT = [
    *HEADS_FIRST,
    node("Transpose", "k1", "k2", perm=[0, 1, 3, 2]),
    node("MatMul", "q1 k2", "s0"),
    node("Div", "s0 two", "s1"),
]
MIX = [
    node("Softmax", "s", "p", axis=-1),
    node("MatMul", "p v1", "o0"),
    node("Transpose", "o0", "o1", perm=[0, 2, 1, 3]),
    node("Reshape", "o1 merge", "out"),
]
FEATURES = [BATCH, LENGTH, HEADS * DIM]
QKV = dict.fromkeys("qkv", (FLOAT, FEATURES))
CONSTANTS = {
    "split": np.array([0, -1, HEADS, DIM]),
    "merge": np.array([0, -1, HEADS * DIM]),
    "two": np.array(2.0, "float32"),
    "low": np.array(-3.4e38, "float32"),
    "lower": np.array(-1e4, "float32"),
    "one": np.array(1.0, "float32"),
    "cap": np.array(30.0, "float32"),
    "pair": np.array([1, 1, 2, 1, 1]),
    "all": np.array([0, HEADS, LENGTH, DIM]),
    "two_heads": np.array([0, -1, 2, DIM]),
    "axis": np.array([2]),
    "triangle": np.tril(np.ones((1, 1, LENGTH, LENGTH), bool)),
    "causal": np.triu(np.full((LENGTH, LENGTH), -np.inf, "float32"), 1),
}


def imported(
    nodes: Sequence[NodeProto], inputs: dict[str, tuple[int, list]], out: list | None = None
) -> tvm.IRModule:
    """Make a graph of nodes and import it."""
    used = {name for n in nodes for name in n.input}
    graph = helper.make_graph(
        list(nodes),
        "main",
        [helper.make_tensor_value_info(name, *of) for name, of in inputs.items()],
        [helper.make_tensor_value_info("out", FLOAT, out or FEATURES)],
        [numpy_helper.from_array(v, n) for n, v in CONSTANTS.items() if n in used],
    )
    opsets = [helper.make_opsetid("", 14), helper.make_opsetid("com.microsoft", 1)]
    model: ModelProto = helper.make_model(graph, opset_imports=opsets)
    return from_onnx(model, keep_params_in_input=False)


PADDED = (True, False, False, True)
WRITTEN_OUT = [
    ("plain", [node("Identity", "s1", "s")], {}, BASE, ()),
    ("causal_constant", [node("Add", "s1 causal", "s")], {}, replace(BASE, causal="top_left"), ()),
    (
        "causal_where",
        [node("Where", "triangle s1 low", "s")],
        {},
        replace(BASE, causal="top_left"),
        (),
    ),
    (
        "mask_of_bert",
        [node("Sub", "one m", "m0"), node("Mul", "m0 lower", "m1"), node("Add", "s1 m1", "s")],
        {"m": (FLOAT, [BATCH, 1, 1, LENGTH])},
        replace(BASE, bias_dims=PADDED),
        ("multiply", "subtract"),
    ),
    (
        "boolean_mask",
        [node("Where", "m s1 low", "s")],
        {"m": (BOOL, [BATCH, 1, 1, LENGTH])},
        replace(BASE, mask_dims=PADDED),
        (),
    ),
    (
        "soft_cap_of_gemma",
        [
            node("Div", "s1 cap", "s2"),
            node("Tanh", "s2", "s3"),
            node("Mul", "s3 cap", "s4"),
            node("Add", "s4 causal", "s"),
        ],
        {},
        replace(BASE, softcap=30.0, causal="top_left"),
        (),
    ),
]


@pytest.mark.parametrize(
    ("nodes", "inputs", "work", "left"),
    [case[1:] for case in WRITTEN_OUT],
    ids=[case[0] for case in WRITTEN_OUT],
)
def test_written_out(nodes, inputs, work: Attention, left) -> None:
    out, (decision,) = fused(imported([*PRODUCT, *nodes, *MIX], QKV | inputs))
    assert replace(decision.workload, scale=round(decision.workload.scale, 6)) == work
    others = [c for c in calls(out["main"]) if c != "reshape"]
    assert sorted(others) == sorted(["call_tir", *left])


def test_heads_shared_by_expand() -> None:
    shared = []
    for x in "kv":
        shared += [
            node("Reshape", f"{x} two_heads", f"{x}0"),
            node("Transpose", f"{x}0", f"{x}h", perm=[0, 2, 1, 3]),
            node("Unsqueeze", f"{x}h axis", f"{x}e"),
            node("Expand", f"{x}e pair", f"{x}r"),
            node("Reshape", f"{x}r all", f"{x}1"),
        ]
    queries = [n for n in HEADS_FIRST if n.input[0].startswith("q")]
    nodes = [*queries, *shared, *PRODUCT[len(HEADS_FIRST) :], node("Identity", "s1", "s"), *MIX]
    narrow = (FLOAT, [BATCH, LENGTH, 2 * DIM])
    out, (decision,) = fused(imported(nodes, {"q": (FLOAT, FEATURES), "k": narrow, "v": narrow}))
    assert decision.workload == replace(BASE, kv_heads=2)
    assert [c for c in calls(out["main"]) if c != "reshape"] == ["call_tir"]


@pytest.mark.parametrize("bias", [False, True])
def test_contributed_operator(bias: bool) -> None:
    inputs = {
        "x": (FLOAT, FEATURES),
        "w": (FLOAT, [HEADS * DIM, 3 * HEADS * DIM]),
        "b": (FLOAT, [3 * HEADS * DIM]),
    }
    operands = "x w b - - "
    if bias:
        inputs["y"] = (FLOAT, [BATCH, HEADS, LENGTH, LENGTH])
    operands += "y -" if bias else "- -"
    nodes = [node("Attention", operands, "out", num_heads=HEADS, contributed=True)]
    out, (decision,) = fused(imported(nodes, inputs))
    dims = (True, True, True, True) if bias else None
    found = replace(decision.workload, scale=round(decision.workload.scale, 6))
    assert found == replace(BASE, scale=round(DIM**-0.5, 6), bias_dims=dims, **thirds(HEADS))
    assert calls(out["main"]).count("call_tir") == 1
    assert "nn.attention" not in calls(out["main"])
