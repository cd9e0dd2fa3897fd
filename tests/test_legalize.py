"""Attention with scores so negative that TVM's own legalisation divides zero by zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from tvm import relax, tirx

from relax_fusion.legalize import LEGALIZE_MAP

from . import common


def attention_module(dtype: str, dim: int) -> tvm.IRModule:
    """Causal attention with symbolic lengths."""
    seq_len, context = tirx.Var("seq_len", "int64"), tirx.Var("context", "int64")
    q, k, v = (
        relax.Var(name, relax.TensorType((1, length, 2, dim), dtype))
        for name, length in (("q", seq_len), ("k", context), ("v", context))
    )
    bb = relax.BlockBuilder()
    with bb.function("main", [q, k, v]):
        with bb.dataflow():
            scale = tirx.FloatImm(dtype, dim**-0.5)
            call = relax.op.nn.attention(q, k, v, scale=scale, causal_mask="BottomRight")
            out = bb.emit_output(call)
        bb.emit_func_output(out)
    return relax.transform.LegalizeOps(LEGALIZE_MAP)(bb.get())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shift", [0.0, 12.0])
def test_attention_matches_torch(dtype, shift):
    dim = 16
    vm = relax.VirtualMachine(tvm.compile(attention_module(dtype, dim), "llvm"), tvm.cpu())
    rng = np.random.default_rng(0)
    for seq_len, context in ((1, 1), (5, 5), (1, 9), (3, 9)):
        # Opposite shifts of queries and keys move every score by -576, far below underflow.
        q = (rng.standard_normal((1, seq_len, 2, dim)) + shift).astype(dtype)
        k = (rng.standard_normal((1, context, 2, dim)) - shift).astype(dtype)
        v = rng.standard_normal((1, context, 2, dim)).astype(dtype)
        got = vm["main"](*(tvm.runtime.tensor(x) for x in (q, k, v))).numpy()
        peer, exact = (torch_attention(kind, q, k, v) for kind in (dtype, "float64"))
        common.assert_as_accurate(got, peer, exact, dtype)


def torch_attention(dtype: str, *arrays: np.ndarray) -> np.ndarray:
    q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)).transpose(1, 2) for x in arrays)
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    visible = visible.tril(k.shape[2] - q.shape[2])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    return out.transpose(1, 2).double().numpy()
