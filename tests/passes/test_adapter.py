"""FuseAdapters: which adapters it takes along, what it leaves and why, numbers, launches."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_fusion import Adapter, NormMatmul, Reason, make_target
from relax_fusion.launch.nvrtc import NEEDED, find_nvrtc
from relax_fusion.matching import adapter
from relax_fusion.workload.reference import evaluate as reference

from ..support.accuracy import eps_of
from ..support.cases import Case, cases
from ..support.chain_reference import evaluate
from ..support.chains import Chain, module, run_pass
from ..triton_bridge.common import launched

needs_nvrtc = pytest.mark.skipif(find_nvrtc() is None, reason=f"needs {NEEDED}")

PASS = "FuseAdapters"
H200 = {"target": make_target("h200"), "backend": "triton"}
ALWAYS = {**H200, "always_fuse": True}
TENSORS = "x[6,64] W[48,64] A[16,64] B[48,16]"
NT = "w = R.permute_dims(W); a = R.permute_dims(A); c = R.permute_dims(B)\n"
LOW = NT + "m = R.matmul(x, w); h = R.matmul(x, a); l = R.matmul(h, c)\n"
CASES = cases(PASS)


def half(name: str, inputs: str, body: str, result: str = "y", **sizes: int) -> Chain:
    return Chain(name, inputs, body, result, sizes, dtype="float16")


def check_numbers(chain: Chain, wanted: NormMatmul, args: str) -> None:
    """Check that the workload computes what the chain does, up to the chain's own roundings."""
    arrays = chain.arrays()
    given = dict(zip((name for name, _, _ in chain.tensors()), arrays, strict=True))
    operands = wanted.graph.inputs
    sizes = {"rows": int(np.prod(given["x"].shape[:-1]))}
    inputs = {
        o.name: given[name].reshape([sizes.get(str(getattr(d, "name", d)), d) for d in o.shape])
        for o, name in zip(operands, args.split(), strict=True)
    }
    mod = module([chain])
    found = reference(wanted.graph, inputs)
    for got, exact in zip(found.values(), evaluate(mod[chain.name], arrays), strict=True):
        error = np.abs(got.astype("float64").reshape(exact.shape) - exact)
        assert error.max() <= 4 * eps_of("float16") * np.abs(exact).max()


FUSED = [CASES[name] for name in ("plain", "peft", "scaled_between", "scaled_twice")]


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_numbers(case: Case) -> None:
    _, (decision,) = run_pass(module([case.chain]), PASS, **ALWAYS)
    assert decision.validation == "checked"
    check_numbers(case.chain, decision.workload, case.outcome.split("operands ")[1].split("\n")[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {**ALWAYS, "backend": "tir"},
            "no kernel of backend 'tir' for the H200 adds what adapters",
        ),
        ({**ALWAYS, "target": make_target("a100")}, "needs TMA and wgmma (sm_90), which the"),
        ({"always_fuse": True}, "no kernel of backend 'tir'"),
    ],
)
def test_other_devices_have_no_kernel(options: dict[str, Any], words: str) -> None:
    mod = module([CASES["plain"].chain])
    out, (decision,) = run_pass(mod, PASS, **options)
    tvm.ir.assert_structural_equal(out, mod)
    assert decision.decline.reason is Reason.NO_PLAN and words in decision.decline.detail


def test_a_wrong_factor_is_seen() -> None:
    """By what interprets each match beside what it replaces."""
    mod = module([CASES["peft"].chain])
    with (
        mock.patch.object(
            adapter, "Adapter", lambda rank, layout, scale: Adapter(rank, layout, 1.0)
        ),
        pytest.raises(Exception, match="would compute something else"),
    ):
        run_pass(mod, PASS, **ALWAYS)


# --- in the pipeline -------------------------------------------------------------------------

LARGE = "x[n,4096] W[4096,4096] A[16,4096] B[4096,16]"


@needs_nvrtc
def test_an_adapter_is_two_launches_of_the_hopper_kernel() -> None:
    chain = half("main", LARGE, LOW + 'u = R.multiply(l, R.const(2.0, "float16")); y = R.add(m, u)')
    pipeline = relax.get_pipeline(
        "relax_fusion", target="h200", backend="triton", variable_bounds={"n": 64}
    )
    with make_target("h200"):
        mod = pipeline(module([chain]))
    names = launched(mod)
    assert names and len(names) % 2 == 0 and all(n.startswith("matmul") for n in names)
