"""Right matches whose sizes or constants are unusual are checked, or say why not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm
from tvm import ir, relax

from relax_fusion.equivalence import Mismatch, Unchecked, check_match

from .matches import largest_match, matched

ROWS = {
    "n - 4": lambda n: n - 4,
    "n // (n - 3)": lambda n: n // (n - 3),
    "n - 4096": lambda n: n - 4096,
    "n // (n - 8)": lambda n: n // (n - 8),
}


def projection(rows: str) -> ir.IRModule:
    """A norm and a matmul of `rows` rows, beside a tensor of n."""
    n = tvm.tirx.Var("n", "int64")
    shapes = {"all": [n], "x": [ROWS[rows](n), 32], "g": [32], "w": [32, 16]}
    params = [relax.Var(name, relax.TensorType(s, "float32")) for name, s in shapes.items()]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            normed = builder.emit(relax.op.nn.rms_norm(params[1], params[2], axes=[-1]))
            made = builder.emit_output(relax.op.matmul(normed, params[3]))
        builder.emit_func_output(made)
    return builder.get()


@pytest.mark.parametrize("rows", ["n - 4", "n // (n - 3)", "n // (n - 8)"])
def test_sizes_that_make_others_impossible_are_passed_over(rows: str) -> None:
    view, match = largest_match(projection(rows), "FuseRMSNormMatmul")
    assert check_match(view, match) is None


def test_a_match_for_which_no_sizes_are_found_is_unchecked() -> None:
    view, match = largest_match(projection("n - 4096"), "FuseRMSNormMatmul")
    assert isinstance(check_match(view, match), Unchecked)


@pytest.mark.parametrize("scale", [0.7071, 0.70711, 0.79788, 1.4142])
@pytest.mark.parametrize("gelu", ["g = R.nn.gelu(c)", ""])
def test_a_scale_near_a_number_of_a_formula_is_no_part_of_it(scale: float, gelu: str) -> None:
    written_out = (
        "d = R.divide(c, R.const(1.4142135)); e = R.erf(d); f = R.add(e, R.const(1.0))\n"
        "p = R.multiply(c, f); g = R.multiply(p, R.const(0.5))"
    )
    body = f"h = R.matmul(x, A); c = R.multiply(h, R.const({scale}))\n{gelu or written_out}"
    view, match = matched("FuseMatmulEpilogue", "x[5,32] A[32,8]", body, "g")
    assert check_match(view, match) is None


def test_static_lengths_and_a_symbolic_batch_are_checked_at_any_batch() -> None:
    call = 'y = R.nn.attention(q, k, v, causal_mask="BottomRight", window_size=30)'
    view, match = matched("FuseAttentionChain", "q[n,40,2,8] k[n,40,2,8] v[n,40,2,8]", call)
    assert check_match(view, match) is None


@pytest.mark.parametrize("norm", ["R.nn.rms_norm(s, g,", "R.nn.layer_norm(s, g, b,"])
@pytest.mark.parametrize(("epsilon", "other"), [(1e-12, 1e-11), (1e-5, 1.001e-5)])
def test_another_epsilon_is_found(norm: str, epsilon: float, other: float) -> None:
    body = f"s = R.add(x, r); h = {norm} axes=[-1], epsilon={epsilon})\ny = R.matmul(h, W)"
    view, match = matched("FuseRMSNormMatmul", "x[1,32] r[1,32] g[32] b[32] W[32,48]", body)
    assert check_match(view, match) is None
    work = match.workload
    wrong = replace(match, workload=replace(work, norm=replace(work.norm, eps=other)))
    assert isinstance(check_match(view, wrong), Mismatch)


def test_a_window_that_is_too_long_is_named() -> None:
    call = 'y = R.nn.attention(q, k, v, causal_mask="TopLeft", window_size=100000)'
    view, match = matched("FuseAttentionChain", "q[1,n,2,8] k[1,n,2,8] v[1,n,2,8]", call)
    found = check_match(view, match)
    assert isinstance(found, Unchecked) and "too large to compute: 100002" in found.detail


@pytest.mark.parametrize("epsilon", [-1.0, 0.0, 1e300])
def test_odd_epsilons_end_no_check(epsilon: float) -> None:
    body = f"h = R.nn.rms_norm(x, g, axes=[-1], epsilon={epsilon})\ny = R.matmul(h, W)"
    view, match = matched("FuseRMSNormMatmul", "x[3,32] g[32] W[32,48]", body)
    assert check_match(view, match) is None
