"""What is mended of TVM's and MLC-LLM's modules, and what MLC-LLM expects of TVM's names."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.llm.position_embedding import llama_rope_with_position_map
from tvm.script import ir as I
from tvm.script import tirx as T
from tvm.sym import Analyzer

from relax_fusion.matching.expressions import found_in
from relax_fusion.mend.single_elements import ReadSingleElements
from relax_fusion.mlc import repairs
from relax_fusion.mlc.aliases import restore, tensor_ir_op
from relax_fusion.mlc.repairs import (
    POSITIONS,
    NumberFirstExperts,
    RunThreadsInTurn,
    TakePositionsOfBatch,
)

from ..support.quick import machine, quickly


def test_a_dim_of_size_one_is_read_at_its_element() -> None:
    @I.ir_module
    class Before:
        @T.prim_func(s_tir=True)
        def main(a: T.Buffer((1, 4), "float32"), b: T.Buffer((4,), "float32")):
            for i in range(4):
                b[i] = a[i, i] * b[0]

        @T.prim_func(s_tir=True)
        def other(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
            for i in range(4):
                b[i] = a[i]

    @I.ir_module
    class Expected:
        @T.prim_func(s_tir=True)
        def main(a: T.Buffer((1, 4), "float32"), b: T.Buffer((4,), "float32")):
            for i in range(4):
                b[i] = a[0, i] * b[0]

        @T.prim_func(s_tir=True)
        def other(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
            for i in range(4):
                b[i] = a[i]

    after = ReadSingleElements()(Before)
    tvm.ir.assert_structural_equal(after, Expected)
    assert after["other"].same_as(Before["other"])


@T.prim_func(s_tir=True)
def scaled(
    x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32"), times: T.int32, plus: T.int32
):
    for i in range(4):
        with T.sblock("scaled"):
            vi = T.axis.spatial(4, i)
            y[vi] = x[vi] * T.Cast("float32", times) + T.Cast("float32", plus)


def positions_of(tokens: tuple, read: str, name: str = POSITIONS) -> tvm.IRModule:
    """Return a function that adds what a table has at the positions of its tokens."""
    return tvm.script.from_source(
        f"""
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor({tokens}, "float32"), table: R.Tensor((16, 4), "float32"),
             cache: R.Tensor(("n",), "int32")):
        n = T.int64()
        with R.dataflow():
            p = R.call_pure_packed("{name}", cache, ty_args=R.Tensor((1,), "int32"))
            e = {read}
            y = R.add(x, e)
            R.output(y)
        return y
"""
    )


def test_positions_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tests.positions"
    tvm.register_global_func(name, lambda cache: cache, override=True)
    monkeypatch.setattr(repairs, "POSITIONS", name)
    lookup = "R.take(table, p, axis=0)"
    before = positions_of(("b", 1, 4), lookup, name)
    vm = machine(quickly(TakePositionsOfBatch()(before), "default"))
    rng = np.random.default_rng(0)
    x, table = rng.random((3, 1, 4), "float32"), rng.random((16, 4), "float32")
    places = np.array([5, 0, 9], "int32")
    found = vm["main"](*map(tvm.runtime.tensor, (x, table, places)))
    assert (found.numpy() == x + table[places][:, None]).all()


@pytest.mark.parametrize(
    "tokens, read",
    [
        ((1, 1, 4), "R.take(table, p, axis=0)"),
        (("b", 2, 4), "R.take(table, p, axis=0)"),
        (("b", 1, 4), 'R.reshape(R.astype(p, "float32"), (1, 1))'),
    ],
)
def test_positions_that_stay(tokens: tuple, read: str) -> None:
    before = positions_of(tokens, read)
    assert TakePositionsOfBatch()(before).same_as(before)


def test_a_buffer_is_true_and_another_variable_has_no_truth() -> None:
    restore()
    assert tirx.decl_buffer((4,), "float32")
    with pytest.raises(ValueError, match="Cannot use and / or / not"):
        bool(tirx.Var("n", "int64"))


def test_longrope_is_read() -> None:
    restore()
    scaling = {"rope_type": "longrope", "max_position_embeddings": 64}
    scaling["original_max_position_embeddings"] = 32
    func = llama_rope_with_position_map(1e4, 1.0, 8, 2, 1, "float32", scaling)
    assert [b.name for b in func.params if tirx.is_buffer_var(b)][-1] == "ext_factors"


def test_numbers_behind_outputs_and_in_another_dtype() -> None:
    class Model(nn.Module):
        def forward(self, x: nn.Tensor, n: tirx.Var) -> nn.Tensor:
            out = nn.Tensor.placeholder([4], "float32")
            return tensor_ir_op(scaled, "scaled", [x, n, tirx.const(3, "int64")], out)

    spec = {"forward": {"x": nn.spec.Tensor([4], "float32"), "n": int}}
    mod, _ = Model().export_tvm(spec)
    vm = machine(quickly(mod, relax.get_pipeline("relax_fusion", target="llvm")))
    x = tvm.runtime.tensor(np.arange(4, dtype="float32"))
    assert vm["forward"](x, tvm_ffi.Shape([5])).numpy().tolist() == [3.0, 8.0, 13.0, 18.0]


def test_names_that_tvm_moved() -> None:
    restore()
    x = relax.Var("x", relax.TensorType((tirx.Var("n", "int64"),), "float32"))
    assert x.name_hint == "x"
    (n,) = x.ty.shape.values
    found: list[tirx.Var] = []
    tirx.stmt_functor.post_order_visit(n + 1, found.append)
    assert any(node.same_as(n) for node in found)
    replaced = tirx.stmt_functor.substitute(n + 1, {n: tirx.const(2, "int64")})
    assert int(Analyzer().simplify(replaced)) == 3
    assert isinstance(relax.DataTypeImm("float16"), relax.DataTypeImm)
    assert isinstance(relax.const(1.0), relax.Constant)


def test_first_experts_are_numbered() -> None:
    @I.ir_module(check_well_formed=False)
    class Module:
        @T.prim_func(s_tir=True)
        def main(chosen: T.Buffer((3,), "int32"), x: T.Buffer((3,), "float32")):
            for i in range(3):
                x[i] = T.float32(2)
            chosen[-1] = 0
            chosen[-1] = 1
            chosen[2] = 7

        @T.prim_func(s_tir=True)
        def other(x: T.Buffer((3,), "float32")):
            for i in range(3):
                x[i] = T.float32(2)

    after = NumberFirstExperts()(Module)
    assert after["other"].same_as(Module["other"])
    stores = [
        (str(s.indices[0]), str(s.value)) for s in found_in(after["main"].body, tirx.BufferStore)
    ]
    assert stores[1:] == [("0", "0"), ("1", "1"), ("2", "7")]


def test_threads_run_in_turn() -> None:
    @I.ir_module
    class Before:
        @T.prim_func(s_tir=True)
        def main(a: T.Buffer((8, 4), "float32"), b: T.Buffer((8, 4), "float32")):
            T.func_attr({"tirx.is_scheduled": True})
            for block in T.thread_binding(8, "blockIdx.x"):
                with T.sblock("turned"):
                    vb = T.axis.spatial(8, block)
                    tile = T.sblock_alloc_buffer((4,), scope="shared")
                    for i in T.thread_binding(4, "threadIdx.x"):
                        with T.sblock("read"):
                            vi = T.axis.spatial(4, i)
                            tile[vi] = a[vb, vi]
                    T.tvm_storage_sync("shared")
                    if T.tvm_thread_invariant(vb < 7):
                        for j in T.thread_binding(4, "threadIdx.x"):
                            with T.sblock("written"):
                                vj = T.axis.spatial(4, j)
                                b[vb, vj] = tile[3 - vj]

        @T.prim_func(s_tir=True)
        def other(a: T.Buffer((4,), "float32")):
            for i in T.vectorized(4):
                a[i] = T.float32(0)

    after = RunThreadsInTurn()(Before)
    assert after["other"].same_as(Before["other"])
    text = after["main"].script()
    assert "thread" not in text and "sync" not in text
    a = np.arange(32, dtype="float32").reshape(8, 4)
    out = tvm.runtime.tensor(np.zeros((8, 4), "float32"))
    quickly(after["main"].with_attr("global_symbol", "main"))(tvm.runtime.tensor(a), out)
    assert (out.numpy()[:7] == a[:7, ::-1]).all() and not out.numpy()[7].any()
