"""FuseAttentionChain outside of dataflow blocks, on several devices, and of sizes of one name."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, tirx

from relax_fusion import DynamicDim, Reason

from ..support.chain_reference import evaluate
from ..support.chains import HEADER, Chain, assert_declined, compiled, module, outputs, run_pass

PASS = "FuseAttentionChain"
QKV = "q[2,5,4,8] k[2,7,4,8] v[2,7,4,8]"


def test_an_attention_outside_a_dataflow_block() -> None:
    chain = Chain("main", QKV, "o = R.nn.attention(q, k, v)", "o", dataflow=False)
    assert_declined(module([chain]), PASS, Reason.SIDE_EFFECT, "not in a dataflow block")


def test_declines_mixed_virtual_devices() -> None:
    text = HEADER + Chain("main", QKV, "o = R.nn.attention(q, k, v)", "o").script()
    info = 'I.module_global_infos({"vdevice": [I.vdevice("llvm"), I.vdevice("cuda", 0)]})'
    text = text.replace("class Module:", f"class Module:\n    {info}\n")
    text = text.replace('(2, 5, 4, 8), "float32"', '(2, 5, 4, 8), "float32", "cuda:0"')
    text = text.replace('(2, 7, 4, 8), "float32"', '(2, 7, 4, 8), "float32", "llvm:0"')
    assert_declined(tvm.script.from_source(text), PASS, Reason.VDEVICE, "cuda")


def test_two_sizes_of_one_name_stay_two() -> None:
    rows, positions = tirx.Var("n", "int64"), tirx.Var("n", "int64")
    q, k, v = (
        relax.Var(name, relax.TensorType((1, length, 2, 8), "float32"))
        for name, length in (("q", rows), ("k", positions), ("v", positions))
    )
    builder = relax.BlockBuilder()
    with builder.function("main", [q, k, v]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.attention(q, k, v))
        builder.emit_func_output(out)
    mod = builder.get()
    _, (decision,) = run_pass(mod, PASS)
    work = decision.workload
    assert (work.q_len, work.kv_len) == (DynamicDim("n"), DynamicDim("n_2"))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, s, 2, 8)).astype("float32") for s in (3, 7, 7)]
    (got,) = outputs(compiled(mod), "main", arrays)
    (exact,) = evaluate(mod["main"], arrays)
    np.testing.assert_allclose(got, exact, rtol=0, atol=8 * np.finfo("float32").eps)
