"""Words for the attentions that the tests of FuseAttentionChain write down."""

from __future__ import annotations

import tvm
from tvm import relax

from relax_fusion.report.decision import Decision
from relax_fusion.workload import Heads

from .chains import run_pass

PASS = "FuseAttentionChain"
QKV = "q[2,4,5,8] k[2,4,7,8] v[2,4,7,8]"


def thirds(heads: int) -> dict[str, Heads]:
    """Return where q, k and v are in a projection that has them one after the other."""
    return {f"{x}_in": Heads(3 * heads, i * heads) for i, x in enumerate("qkv")}


def turns(heads: int) -> dict[str, Heads]:
    """Return where q, k and v are in a projection that has them in turns, head by head."""
    return {f"{x}_in": Heads(3 * heads, i, 3) for i, x in enumerate("qkv")}


def attention(steps: str, scores: str = "s") -> str:
    """Return an attention of q, k and v with `steps` from the product s0 to the scores."""
    first = "t = R.permute_dims(k, axes=[0, 1, 3, 2]); s0 = R.matmul(q, t)\n"
    last = f"\np = R.nn.softmax({scores}, axis=-1); o = R.matmul(p, v)"
    return first + steps + last


def const(value: float, dtype: str = "float32") -> str:
    """Return a scalar as TVMScript, where 1e999 stands for infinity."""
    text = repr(value).replace("inf", "1e999")
    return f'R.const({text}, "{dtype}")'


def positions(q_len: str = "5", kv_len: str = "7", offset: int = 0) -> str:
    """Return bindings of i, queries as a column of positions, and j, keys as a row."""
    return (
        f'i0 = R.arange(0, {q_len}, 1, "int64"); j0 = R.arange(0, {kv_len}, 1, "int64")\n'
        f'i1 = R.add(i0, R.const({offset}, "int64"))\n'
        "i = R.expand_dims(i1, axis=[1]); j = R.expand_dims(j0, axis=[0])\n"
    )


def without_dead_code(mod: tvm.IRModule) -> tvm.IRModule:
    """Drop masks that no kernel reads any more, as the pipeline does after its passes."""
    return relax.transform.DeadCodeElimination()(mod)


def fused(mod: tvm.IRModule) -> tuple[tvm.IRModule, list[Decision]]:
    """Apply the pass to a module in which it must fuse all that it finds."""
    out, decisions = run_pass(mod, PASS)
    assert [str(d.decline) for d in decisions if not d.fused] == []
    return without_dead_code(out), decisions
