"""FuseMatmulEpilogue of constant weights and of every range of rows."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax

from relax_fusion import Projection

from ..support.chains import Chain, assert_numbers, compiled, module, run_pass

PASS = "FuseMatmulEpilogue"


M = "m = R.matmul(x, W)\n"


def test_constant_weight() -> None:
    mod = module([Chain("main", "x[6,32] W[32,48]", M + "y = R.nn.relu(m)", "y")])
    weight = tvm.runtime.tensor(Chain("w", "W[32,48]", "", "").arrays()[0])
    bound = relax.transform.BindParams("main", {"W": weight})(mod)
    out, (decision,) = run_pass(bound, PASS)
    assert decision.workload.outputs == (Projection(48, "kn", ("relu",)),)
    assert len(out["main"].params) == 1


@pytest.mark.parametrize("rows", [0, 1, 2, 17, 70, 300])
def test_every_range_of_rows(ranges, rows: int) -> None:
    vm, mod, chain = ranges
    sized = Chain(chain.name, chain.inputs, chain.body, chain.result, {"n": rows})
    if rows == 0:
        arrays = sized.arrays()
        assert vm["rows"](*map(tvm.runtime.tensor, arrays)).shape == (0, 40)
    else:
        assert_numbers(vm, mod, sized)


@pytest.fixture(scope="module")
def ranges():
    body = "t = R.permute_dims(W); m = R.matmul(x, t); y = R.add(m, r)"
    chain = Chain("rows", "x[n,32] W[40,32] r[n,40]", body, "y")
    mod = module([chain])
    return compiled(mod), mod, chain


def test_an_activation_of_another_is_left_behind() -> None:
    """Each repeats what is in front of it: kernels of two took minutes to compile."""
    steps = "; ".join(f"v{i + 1} = R.nn.gelu_tanh(v{i})" for i in range(6))
    chain = Chain("six", "x[6,32] W[32,48]", f"v0 = R.matmul(x, W); {steps}", "v6")
    for name in (PASS, "FuseGatedFFN"):
        mod, _ = run_pass(module([chain]), name)
        assert mod["six"].script().count("R.nn.gelu_tanh") == 5
