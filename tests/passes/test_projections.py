"""FuseProjections: which matmuls of the same rows go together, and their numbers."""

from __future__ import annotations

import pytest

from relax_fusion import Reason, Report
from relax_fusion.workload import Projection

from ..support.chains import Chain, assert_numbers, compiled, module, run_pass

PASS = "FuseProjections"
INPUTS = "x[n,32] W[32,48] V[32,16] U[48,16] b[16]"
BOTH = "k = R.matmul(x, W); v = R.matmul(x, V)"
KEYS, VALUES = Projection(48, "kn"), Projection(16, "kn")


def fused(body: str, result: str = "(k, v)", inputs: str = INPUTS) -> list[tuple[Projection, ...]]:
    """Return the projections of each kernel that the pass makes."""
    mod = module([Chain("main", inputs, body, result)])
    _, decisions = run_pass(mod, PASS, always_fuse=True)
    return [d.workload.outputs for d in decisions if d.fused]


def test_each_has_its_own_steps() -> None:
    body = f"{BOTH}; w = R.add(v, b); l = R.nn.silu(w)"
    assert fused(body, "(k, l)") == [(KEYS, Projection(16, "kn", ("bias", "silu")))]


def test_one_alone_is_left_to_others() -> None:
    assert fused("k = R.matmul(x, W)", "k") == []


@pytest.mark.parametrize("between", ["R.matmul(k, U)", "R.matmul(R.exp(k), U)"])
def test_none_waits_for_what_needs_another(between: str) -> None:
    after = f"k = R.matmul(x, W); h = {between}; v = R.matmul(x, V)"
    assert fused(after, "(h, v)") == []
    assert fused(f"{BOTH}; h = {between}; w = R.matmul(x, W)", "(h, v, w)") == [(KEYS, VALUES)]


def test_the_result_of_one_is_no_operand_of_another() -> None:
    body = "k = R.matmul(x, W); v = R.matmul(x, V); y = R.add(v, k)"
    assert fused(body, "y", "x[n,32] W[32,48] V[32,48]") == [(KEYS, KEYS)]


def test_rows_of_another_tensor_stay_apart() -> None:
    assert fused("k = R.matmul(x, W); v = R.matmul(z, V)", inputs=f"{INPUTS} z[n,32]") == []


def test_results_of_another_dtype_stay_apart() -> None:
    body = "k = R.matmul(x, W); m = R.matmul(x, V); v = R.astype(m, 'float32')"
    mod = module([Chain("main", INPUTS, body, "(k, v)", dtype="float16")])
    _, decisions = run_pass(mod, PASS, always_fuse=True)
    assert not any(d.fused for d in decisions)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numbers(dtype: str) -> None:
    chain = Chain("main", INPUTS, f"{BOTH}; l = R.add(v, b)", "(k, l)", {"n": 5}, dtype)
    mod, report = module([chain]), Report()
    machine = compiled(mod, [chain], report=report, always_fuse=True)
    assert [d.pattern for d in report.fused] == [PASS]
    assert_numbers(machine, mod, chain)


def test_a_weight_may_have_an_unknown_number_of_columns() -> None:
    chain = Chain("main", "x[n,32] W[32,m] V[32,16]", BOTH, "(k, v)", {"n": 5, "m": 9})
    mod, report = module([chain]), Report()
    machine = compiled(mod, [chain], report=report, always_fuse=True)
    assert [d.pattern for d in report.fused] == [PASS]
    assert_numbers(machine, mod, chain)


def test_a_weight_of_unknown_depth_is_no_part() -> None:
    mod = module([Chain("main", "x[n,m] W[m,16] V[m,16]", BOTH, "(k, v)")])
    _, decisions = run_pass(mod, PASS, always_fuse=True)
    assert {d.decline and d.decline.reason for d in decisions} == {Reason.SHAPE}
