"""Constants that are overwritten, or returned, are the same in the next call."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import ir, relax
from tvm.script import relax as R

from relax_fusion import host_target
from relax_fusion.mend.constants import CopyConstants, FoldConstants

from ..support.quick import machine, quickly

MATRIX = 'R.Tensor((2, 2), "float32")'
HEADER = f"""
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def increment(a: T.Buffer((T.int64(2), T.int64(2)), "float32")):
        for i, j in T.grid(T.int64(2), T.int64(2)):
            with T.sblock("increment"):
                vi, vj = T.axis.remap("SS", [i, j])
                a[vi, vj] = a[vi, vj] + T.float32(1)

    @R.function(private=True)
    def callee(a: {MATRIX}) -> {MATRIX}:
        cls = Module
        b = R.call_tir_inplace(cls.increment, (a,), inplace_indices=[0], out_ty={MATRIX})
        return b
"""
WRITE = f"R.call_tir_inplace(cls.increment, ({{}},), inplace_indices=[0], out_ty={MATRIX})"
ZEROS = 'R.zeros((2, 2), "float32")'
THREES = 'R.multiply(R.ones((2, 2), "float32"), R.const(3.0, "float32"))'

CASES = {
    "overwritten": (f"a = {ZEROS}; y = {WRITE.format('a')}", 1),
    "read_behind_the_write": (f"a = {ZEROS}; b = {WRITE.format('a')}; y = R.add(a, a)", 2),
    "two_alike": (f"a = {ZEROS}; b = {ZEROS}; c = {WRITE.format('a')}; y = R.add(b, c)", 1),
    "computed": (f"a = {THREES}; b = {WRITE.format('a')}; y = R.add(a, x)", 4),
    "overwritten_elsewhere": (f"a = {ZEROS}; b = cls.callee(a); y = R.add(a, b)", 2),
    "added_to_a_product": (
        f"a = {ZEROS}; b = {WRITE.format('a')}; y = R.add(R.matmul(x, x), a)",
        1,
    ),
    "returned": (f"y = {THREES}", 3),
    "a_range": ('a = R.arange(0, 1, 1, "float32"); y = R.expand_dims(a, 0)', 0),
    "a_view_returned": (f"a = {THREES}; y = R.reshape(a, (4,))", 3),
    "a_number": ('y = R.const(5.0, "float32")', 5),
    "nothing": ('a = R.zeros((2, 0), "float32"); y = R.concat((x, a), axis=1)', 0),
    "twice": (f"a = {THREES}; y = (a, x, a)", (3, 0, 3)),
}


@pytest.fixture(scope="module")
def vm() -> relax.VirtualMachine:
    text = HEADER
    for name, (body, _) in CASES.items():
        lines = "".join(f"        {line.strip()}\n" for line in body.split(";"))
        text += f"\n    @R.function\n    def {name}(x: {MATRIX}):\n        cls = Module\n{lines}"
        text += "        return y\n"
    pipeline = relax.get_pipeline("relax_fusion", target=host_target())
    mod = tvm.script.from_source(text)
    return machine(quickly(mod, pipeline))


@pytest.mark.parametrize("name", CASES)
def test_the_next_call_gives_the_same(vm: relax.VirtualMachine, name: str) -> None:
    want = CASES[name][1]
    for _ in range(3):
        x = tvm.runtime.tensor(np.zeros((2, 2), "float32"))
        result = vm[name](x)
        got = list(result) if isinstance(want, tuple) else [result]
        for tensor, value in zip(got, np.atleast_1d(want), strict=True):
            assert (tensor.numpy() == value).all()
        for tensor in got:  # it is the caller's, who may overwrite it
            tensor.copyfrom(np.full(tensor.shape, 99, "float32"))


def constant(values: np.ndarray | None = None) -> relax.Expr:
    return relax.const(np.zeros((2, 2), "float32") if values is None else values)


def test_empty_constants_are_loaded_again() -> None:
    x = relax.Var("x", relax.TensorType((2, 2), "float32"))
    empty = constant(np.zeros((2, 0), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        y = builder.emit(relax.op.concat([x, empty], axis=1))
        builder.emit_func_output(relax.Tuple([y, empty]))
    pipeline = relax.get_pipeline("relax_fusion", target=host_target())
    vm = machine(quickly(builder.get(), pipeline))
    y, empty = vm["main"](tvm.runtime.tensor(np.ones((2, 2), "float32")))
    assert (y.numpy() == 1).all() and empty.shape == (2, 0)


def names(func: relax.Function) -> list[str]:
    """Return the PrimFuncs that a function calls, and the kinds of what else it binds."""
    values = [b.value for block in func.body.blocks for b in block.bindings]
    return [v.args[0].name_hint if isinstance(v, relax.Call) else type(v).__name__ for v in values]


@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: relax.Tuple([relax.Tuple([c]), c])])
def test_constants_are_copied_where_they_are_returned(wrap) -> None:
    result = wrap(constant())
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        builder.emit_func_output(result)
    mod = CopyConstants()(builder.get())
    relax.analysis.well_formed(mod)
    assert names(mod["main"]).count("copy") == 1
    assert names(CopyConstants()(mod)["main"]) == names(mod["main"])


@pytest.mark.parametrize("bound", [False, True])
def test_a_dtype_is_a_constant_without_memory(bound: bool) -> None:
    builder = relax.BlockBuilder()
    with builder.function("main", [], {"relax.force_pure": True}):
        dtype = builder.emit(R.dtype("float32")) if bound else R.dtype("float32")
        packed = relax.ExternFunc("anybody's")
        called = relax.Call(packed, [dtype], ty_args=[relax.TensorType((2,), "float32")])
        builder.emit_func_output(relax.Tuple([builder.emit(called), dtype]))
    mod = builder.get()
    tvm.ir.assert_structural_equal(CopyConstants()(mod), mod)


def test_constants_that_are_read_are_folded_and_not_copied() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 2), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            w = builder.emit(relax.op.permute_dims(constant()))
            y = builder.emit_output(relax.op.matmul(x, w))
        builder.emit_func_output(y)
    mod = relax.transform.LegalizeOps()(CopyConstants()(builder.get()))
    folded = relax.transform.DeadCodeElimination()(FoldConstants()(mod))
    assert names(folded["main"]) == ["matmul"]
    assert isinstance(
        folded["main"].body.blocks[0].bindings[0].value.args[1].fields[1], ir.GenericConst
    )
