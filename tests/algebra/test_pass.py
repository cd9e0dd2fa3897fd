"""SimplifyAlgebra in modules: what it leaves, what it tells, and where it stops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import ir, relax
from tvm.script import ir as I
from tvm.script import relax as R

import relax_fusion
from relax_fusion import Report
from relax_fusion.algebra.simplify import MOST_FIRINGS, MOST_SWEEPS
from relax_fusion.report.tables import report_text
from relax_fusion.studio.compilation import report_of

from ..canonical.common import assert_same_numbers, module, operators
from ..support.quick import quick_host
from .cases import simplified

RNG = np.random.default_rng(0)
A, B = (RNG.standard_normal((64, 96)).astype("float32") for _ in range(2))


def with_constants(body: str, **constants: np.ndarray) -> ir.IRModule:
    """Return ``main`` of x and of constants, whose names are parameters in `body`."""
    params = ", ".join(f"{n}: R.Tensor({a.shape}, 'float32')" for n, a in constants.items())
    mod = module(f"x: R.Tensor((8, 64), 'float32'), {params}", body, symbols="")
    return relax.transform.BindParams("main", dict(constants))(mod)


BOTH = "a = R.matmul(x, A)\nb = R.matmul(x, B)\ny = R.add(a, b)"


def test_constants_are_added() -> None:
    before = with_constants(BOTH, A=A, B=B)
    after, told = simplified(before, exact=True)
    assert operators(after) == ["matmul"] and [t.numbers for t in told] == ["A1"]
    assert_same_numbers(before, after, rtol=1e-6)


def test_what_is_stored_transposed_stays_so() -> None:
    body = "t = R.permute_dims(A)\na = R.matmul(x, t)\ny = R.multiply(a, R.const(3.0, 'float32'))"
    before = with_constants(body.replace("'", '"'), A=A.T.copy())
    after, told = simplified(before, exact=True)
    assert operators(after) == ["permute_dims", "matmul"] and told
    assert_same_numbers(before, after, rtol=1e-5)


def test_only_so_much_is_multiplied_when_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    before = with_constants("a = R.matmul(x, A)\ny = R.matmul(a, B)", A=A, B=B.T.copy())
    for most, fires in ((64 * 96 * 64, True), (64 * 96 * 64 - 1, False)):
        monkeypatch.setattr("relax_fusion.algebra.simplify.MOST_PRODUCTS", most)
        assert bool(simplified(before, exact=True)[1]) is fires


@pytest.mark.parametrize(
    "other",
    [
        "c = R.matmul(R.nn.relu(x), A)\ny = R.add(R.add(a, b), c)",
        "y = R.concat((R.add(a, b), A), axis=0)",
    ],
    ids=["by another matmul", "as it is"],
)
def test_a_constant_that_is_read_elsewhere_stays(other: str) -> None:
    body = f"a = R.matmul(x, A)\nb = R.matmul(x, B)\n{other}"
    assert not simplified(with_constants(body, A=A, B=B), exact=True)[1]


def test_a_constant_of_two_functions_stays() -> None:
    one = with_constants(BOTH, A=A, B=B)
    shared = ir.IRModule({"main": one["main"], "other": one["main"]})
    assert not simplified(shared, exact=True)[1]


def test_packed_weights_stay() -> None:
    words = RNG.integers(-8, 8, (64, 96)).astype("int8")
    text = 'w = R.multiply(R.astype(A, "float32"), B)\na = R.matmul(x, w)\ny = R.negative(a)'
    mod = module(
        "x: R.Tensor((8, 64), 'float32'), A: R.Tensor((64, 96), 'int8'), "
        "B: R.Tensor((64, 96), 'float32')",
        text,
        symbols="",
    )
    mod = relax.transform.BindParams("main", {"A": words, "B": B})(mod)
    assert not simplified(mod, exact=True)[1]


@I.ir_module
class Written:
    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        a = R.negative(x)
        _ = R.call_packed("write", x, ty_args=(R.Tuple,))
        return R.negative(a)


def test_what_is_written_to_stays() -> None:
    assert simplified(Written)[0].same_as(Written)


def test_long_chains_come_to_an_end_and_always_to_the_same() -> None:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((8,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = x
            for _ in range(2 * MOST_FIRINGS):
                y = builder.emit(relax.op.negative(y))
            y = builder.emit_output(y)
        builder.emit_func_output(y)
    mod = builder.get()
    (first, told), (second, _) = simplified(mod, validate=False), simplified(mod, validate=False)
    assert 1 < len(told) <= MOST_FIRINGS * MOST_SWEEPS
    tvm.ir.assert_structural_equal(first, second)
    assert operators(first) == ["reshape"]  # of a parameter


def test_it_is_told_and_left_out_where_that_is_asked(tmp_path: Path) -> None:
    mod = with_constants(BOTH, A=A, B=B)
    for disable, times in ((("SimplifyAlgebra",), 0), ((), 1)):
        report = Report()
        options = {"report": report, "disable": disable, "debug_dump": tmp_path, "validate": True}
        executable = relax_fusion.build(mod, quick_host(), **options)
        x = RNG.standard_normal((8, 64)).astype("float32")
        made = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
        np.testing.assert_allclose(made, x @ A + x @ B, rtol=1e-4, atol=1e-4)
        assert len(report.rewrites) == times
        assert report_text(report).count("x @ A + x @ B -> x @ (A + B)") == times
        assert report_of(json.loads(report.to_json())).rewrites == report.rewrites
