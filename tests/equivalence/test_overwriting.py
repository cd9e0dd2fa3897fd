"""Operands that are overwritten in place between the steps of a chain."""

from __future__ import annotations

import pytest
import tvm
from tvm import ir

from relax_fusion.equivalence import Mismatch, check_match
from relax_fusion.matching import effects

from .matches import largest_match

MATRIX = 'R.Tensor((4, 4), "float32")'
ROW = 'R.Tensor((4,), "float32")'
FILL = f"R.call_tir_inplace(cls.fill, ({{}},), inplace_indices=[0], out_ty=[{MATRIX}])"
PACKED = f'R.call_inplace_packed("fill", {{}}, inplace_indices=[0], ty_args={MATRIX})'
HEADER = f"""
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def fill(a: T.Buffer((T.int64(4), T.int64(4)), "float32")):
        for i, j in T.grid(T.int64(4), T.int64(4)):
            with T.sblock("fill"):
                vi, vj = T.axis.remap("SS", [i, j])
                a[vi, vj] = T.float32(7)

    @R.function
    def main(x: {MATRIX}, w: {MATRIX}, v: {MATRIX}, g: {ROW}, h: {ROW}):
        cls = Module
        with R.dataflow():
"""
NOTHING = effects.Effects()
LATE = "t = R.permute_dims(w); {}; b = R.add(x, u); y = R.matmul(b, t); z = R.nn.relu(y)"
MANY = "; ".join(f"a{i} = R.reshape(a{i - 1}, R.shape([4, 4]))" for i in range(500))
MANY = MANY.replace("a-1", "w")


def block(body: str, result: str = "z") -> ir.IRModule:
    lines = [*body.split("; "), f"R.output({result})"]
    text = "".join(f"            {line}\n" for line in lines)
    return tvm.script.from_source(f"{HEADER}{text}        return {result}\n")


@pytest.mark.parametrize(
    "write",
    [
        f"u = {FILL.format('w')}",
        f"u = {PACKED.format('w')}",
        f"a = w; u = {FILL.format('a')}",
        f"a = R.reshape(w, R.shape([4, 4])); u = {PACKED.format('a')}",
        f"{MANY}; u = {PACKED.format('a499')}",
    ],
    ids=("call_tir", "packed", "other_name", "view", "views"),
)
def test_a_weight_that_is_overwritten_in_between_is_a_mismatch(
    monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    mod = block(LATE.format(write))
    # What tells matchers of writes is taken out
    monkeypatch.setattr(effects.Memory, "_call", lambda self, call, ty: (self._new(ty), NOTHING))
    view, match = largest_match(mod, "FuseMatmulEpilogue")
    assert [a.expr.name for a in match.args] == ["b", "w"]
    assert check_match(view, match) == Mismatch("w is read after u writes its memory")


def test_a_kernel_may_read_what_was_overwritten_before() -> None:
    mod = block(f"u = {FILL.format('w')}; y = R.matmul(x, u); z = R.nn.relu(y)")
    assert check_match(*largest_match(mod, "FuseMatmulEpilogue")) is None


def test_a_kernel_may_stand_in_front_of_a_later_write() -> None:
    mod = block(f"y = R.matmul(x, w); u = {FILL.format('w')}; z = R.nn.relu(y)", "z, u")
    assert check_match(*largest_match(mod, "FuseMatmulEpilogue")) is None


@pytest.mark.parametrize("name", ["a = x", "p = (x, w); a = p[0]"])
def test_another_name_reads_nothing_where_it_is_given(name: str) -> None:
    body = f"{name}; u = {PACKED.format('x')}; y = R.matmul(x, w); z = R.add(y, a)"
    view, match = largest_match(block(body), "FuseMatmulEpilogue")
    assert check_match(view, match) is None


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (f"e = {FILL.format('x')}; NORM; t = R.exp(v)", None),
        (f"NORM; e = {FILL.format('d')}; t = e", "d is read after e writes its memory"),
    ],
    ids=("what it was computed from", "itself"),
)
def test_an_operand_that_is_computed_is_what_a_kernel_reads(
    monkeypatch: pytest.MonkeyPatch, body: str, told: str | None
) -> None:
    """Without a scale, the norm reads a gamma that no kernel takes; its rows are computed of it."""
    norm = "n = R.nn.layer_norm(d, g, h, axes=[-1], scale=False)"
    body = f"s = R.add(x, g); d = R.cumsum(s, axis=1); {body.replace('NORM', norm)}"
    body += "; p = R.matmul(n, w); y = R.matmul(p, w); z = R.add(y, t)"
    monkeypatch.setattr(effects.Memory, "_call", lambda self, call, ty: (self._new(ty), NOTHING))
    view, match = largest_match(block(body, "z, e"), "FuseChains")
    assert {"d", "h", "w"} < {a.expr.name for a in match.args}
    assert check_match(view, match) == (told and Mismatch(told))
