"""FuseAdapters: which adapters it takes along, what it leaves and why, numbers, launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_fusion import Adapter, DynamicDim, Norm, NormMatmul, Projection, Reason, make_target
from relax_fusion.launch.nvrtc import NEEDED, find_nvrtc
from relax_fusion.matching import adapter
from relax_fusion.workload.reference import evaluate as reference

from ..support.accuracy import eps_of
from ..support.chain_reference import evaluate
from ..support.chains import Chain, calls, kernel_args, module, run_pass
from ..triton_bridge.common import launched

needs_nvrtc = pytest.mark.skipif(find_nvrtc() is None, reason=f"needs {NEEDED}")

PASS = "FuseAdapters"
H200 = {"target": make_target("h200"), "backend": "triton"}
ALWAYS = {**H200, "always_fuse": True}
TENSORS = "x[6,64] W[48,64] A[16,64] B[48,16]"
NT = "w = R.permute_dims(W); a = R.permute_dims(A); c = R.permute_dims(B)\n"
LOW = NT + "m = R.matmul(x, w); h = R.matmul(x, a); l = R.matmul(h, c)\n"


def half(name: str, inputs: str, body: str, result: str = "y", **sizes: int) -> Chain:
    return Chain(name, inputs, body, result, sizes, dtype="float16")


def work(
    *steps: Any, rows: Any = 6, layouts: str = "nk nk", norm: Norm | None = None, scale: float = 1.0
) -> NormMatmul:
    layout, of_a = layouts.split()
    projection = Projection(48, layout, steps, adapter=Adapter(16, of_a, scale))
    return NormMatmul(rows, 64, (projection,), norm, "float16", "float16")


REWRITES = {
    "plain": (half("plain", TENSORS, LOW + "y = R.add(m, l)"), work(), "x W A B"),
    "other_order": (half("other_order", TENSORS, LOW + "y = R.add(l, m)"), work(), "x W A B"),
    "peft": (
        half(
            "peft",
            "x[b,s,64] W[48,64] A[16,64] B[48,16] p[48] r[b,s,48]",
            LOW + 'n = R.add(m, p); u = R.multiply(l, R.const(2.0, "float16"))\n'
            "z = R.add(n, u); y = R.add(r, z)",
            b=2,
            s=3,
        ),
        work("bias", "residual", rows=DynamicDim("b * s"), scale=2.0),
        "x W A B p r",
    ),
    "scaled_between": (
        half(
            "scaled_between",
            "x[6,64] W[64,48] A[64,16] B[16,48]",
            'm = R.matmul(x, W); h = R.matmul(x, A); g = R.multiply(h, R.const(0.75, "float16"))\n'
            "l = R.matmul(g, B); z = R.add(m, l); y = R.nn.relu(z)",
        ),
        work("relu", layouts="kn kn", scale=0.75),
        "x W A B",
    ),
    "scaled_twice": (
        half(
            "scaled_twice",
            "x[6,64] W[48,64] A[64,16] B[48,16]",
            "w = R.permute_dims(W); c = R.permute_dims(B); m = R.matmul(x, w)\n"
            'h = R.matmul(x, A); g = R.divide(h, R.const(3.0, "float16")); l = R.matmul(g, c)\n'
            'u = R.multiply(l, R.const(-4.0, "float16")); y = R.add(m, u)',
        ),
        work(layouts="nk kn", scale=-4.0 / 3.0),
        "x W A B",
    ),
    "regrouped_rows": (
        half(
            "regrouped_rows",
            "x[2,3,64] W[64,48] A[64,16] B[16,48]",
            "f = R.reshape(x, [6, 64]); m = R.matmul(f, W); n = R.reshape(m, [2, 3, 48])\n"
            "h = R.matmul(f, A); g = R.reshape(h, [2, 3, 16]); k = R.reshape(g, [6, 16])\n"
            "l = R.matmul(k, B); u = R.reshape(l, [2, 3, 48]); y = R.add(n, u)",
        ),
        work(layouts="kn kn"),
        "x W A B",
    ),
}


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


@pytest.mark.parametrize("case", REWRITES.values(), ids=REWRITES)
def test_rewrites(case: tuple[Chain, NormMatmul, str]) -> None:
    chain, wanted, args = case
    mod, decisions = run_pass(module([chain]), PASS, **ALWAYS)
    (decision,) = decisions
    assert decision.workload == wanted and decision.validation == "checked"
    assert " ".join(kernel_args(mod[chain.name])) == args
    assert [c for c in calls(mod[chain.name]) if c != "reshape"] == ["call_tir"]
    check_numbers(chain, wanted, args)


NORMED = half(
    "normed",
    "x[6,64] g[64] Wq[48,64] Aq[16,64] Bq[48,16] Wk[32,64] Wv[32,64] Av[8,64] Bv[32,8]",
    "n = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)\n"
    "w0 = R.permute_dims(Wq); a0 = R.permute_dims(Aq); b0 = R.permute_dims(Bq)\n"
    "w1 = R.permute_dims(Wk); w2 = R.permute_dims(Wv); a2 = R.permute_dims(Av)\n"
    "b2 = R.permute_dims(Bv); m0 = R.matmul(n, w0); h0 = R.matmul(n, a0)\n"
    "l0 = R.matmul(h0, b0); q = R.add(m0, l0); k = R.matmul(n, w1); m2 = R.matmul(n, w2)\n"
    "h2 = R.matmul(n, a2); l2 = R.matmul(h2, b2); v = R.add(m2, l2)",
    "q, k, v",
)


def test_a_norm_takes_what_has_adapters_along_and_is_returned_to_others() -> None:
    mod, decisions = run_pass(module([NORMED]), PASS, **ALWAYS)
    (decision,) = decisions
    found = decision.workload
    assert [(p.n, p.adapter and p.adapter.rank) for p in found.outputs] == [(48, 16), (32, 8)]
    assert found.norm == Norm("rms", 1e-5, returns_norm=True) and decision.validation == "checked"
    assert sorted(calls(mod["normed"])) == ["call_tir", "matmul", "permute_dims"]


# --- declines --------------------------------------------------------------------------------

SUM = "y = R.add(m, l)"
DECLINES = {
    "rank": (
        half("rank", TENSORS.replace("16", "12"), LOW + SUM),
        *(Reason.SHAPE, "the rank of an adapter is 12, must be a multiple of 8"),
    ),
    "features": (
        half("features", TENSORS.replace("48", "44"), LOW + SUM),
        *(Reason.SHAPE, "the width of a weight with one is 44, must be a multiple of 8"),
    ),
    "dynamic_features": (
        half("dynamic_features", TENSORS.replace("48", "n"), LOW + SUM, n=48),
        *(Reason.SHAPE, "the width of a weight with one is n, must"),
    ),
    "layouts": (
        half(
            "layouts",
            "x[6,64] W[48,64] A[16,64] B[16,48]",
            "w = R.permute_dims(W); a = R.permute_dims(A); m = R.matmul(x, w)\n"
            f"h = R.matmul(x, a); l = R.matmul(h, B); {SUM}",
        ),
        *(Reason.LAYOUT, "the weight lies as nk, the adapter's second one as kn"),
    ),
    "factor": (
        half(
            "factor", TENSORS, LOW + 'u = R.multiply(l, R.const(0.75, "float16")); y = R.add(m, u)'
        ),
        *(Reason.ATTRIBUTE, "0.75 multiplies the adapter's result, must be a power of two"),
    ),
    "zero": (
        half("zero", TENSORS, LOW + 'u = R.multiply(l, R.const(0.0, "float16")); y = R.add(m, u)'),
        *(Reason.ATTRIBUTE, "0 multiplies the adapter's result"),
    ),
    "between_is_returned": (
        half("between_is_returned", TENSORS, LOW + SUM, "h, y"),
        *(Reason.LEAKED, "h is a result"),
    ),
    "between_is_read": (
        half("between_is_read", TENSORS, LOW + SUM + "; z = R.negative(l)", "y, z"),
        *(Reason.MULTI_USE, "l is also read by z"),
    ),
    "dtype": (
        replace(half("dtype", TENSORS, LOW + SUM), dtype="float32"),
        *(Reason.NO_PLAN, "family 'cuda' multiplies it as tf32, which is not allowed"),
    ),
}


@pytest.mark.parametrize("case", DECLINES.values(), ids=DECLINES)
def test_declines(case: tuple[Chain, Reason, str]) -> None:
    chain, reason, words = case
    mod = module([chain])
    out, decisions = run_pass(mod, PASS, **ALWAYS)
    tvm.ir.assert_structural_equal(out, mod)
    (decision,) = decisions
    assert decision.decline.reason is reason and words in decision.decline.detail


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
    mod = module([REWRITES["plain"][0]])
    out, (decision,) = run_pass(mod, PASS, **options)
    tvm.ir.assert_structural_equal(out, mod)
    assert decision.decline.reason is Reason.NO_PLAN and words in decision.decline.detail


UNTOUCHED = {
    "other_rows": half(
        *("other_rows", TENSORS + " t[6,64]"),
        NT + f"m = R.matmul(x, w); h = R.matmul(t, a); l = R.matmul(h, c); {SUM}",
    ),
    "no_sum": half("no_sum", TENSORS, LOW + "y = R.multiply(m, l)"),
    "sum_is_wider": half(
        *("sum_is_wider", "x[1,64] t[5,64] W[48,64] A[16,64] B[48,16]"),
        NT + f"m = R.matmul(t, w); h = R.matmul(x, a); l = R.matmul(h, c); {SUM}",
    ),
    "dynamic_rank": half("dynamic_rank", TENSORS.replace("16", "r"), LOW + SUM, r=16),
    "activation_in_front": half(
        "activation_in_front", TENSORS, LOW + "n = R.nn.relu(m); y = R.add(n, l)"
    ),
    "activation_between": half(
        *("activation_between", TENSORS),
        NT + "m = R.matmul(x, w); h = R.nn.relu(R.matmul(x, a)); l = R.matmul(h, c); " + SUM,
    ),
}


@pytest.mark.parametrize("chain", UNTOUCHED.values(), ids=UNTOUCHED)
def test_other_chains_are_no_adapters(chain: Chain) -> None:
    mod = module([chain])
    out, decisions = run_pass(mod, PASS, **ALWAYS)
    tvm.ir.assert_structural_equal(out, mod)
    assert decisions == []


def test_a_wrong_factor_is_seen() -> None:
    """By what interprets each match beside what it replaces."""
    mod = module([REWRITES["peft"][0]])
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
