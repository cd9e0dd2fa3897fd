"""FuseChains: which regions it takes, how they are written down, numbers of their kernels."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import tvm
from tvm import relax

from relax_fusion import Decision, Reason, make_target
from relax_fusion.errors import LoweringError
from relax_fusion.estimator import candidates
from relax_fusion.estimator.families.generated.plan import GeneratedPlan
from relax_fusion.hardware.target import device_of
from relax_fusion.workload.json import from_json, to_json

from ..support.chains import Chain, calls, module, run_pass
from ..support.generated import check_plan
from ..support.interpreted import Interpreter

PASS = "FuseChains"
H200 = make_target("h200")
ON_GPU = {"target": H200, "backend": "triton"}


def given(chain: Chain) -> tvm.ir.IRModule:
    return relax.transform.CanonicalizeBindings()(module([chain]))


def fused(chain: Chain) -> tuple[relax.Function, Decision]:
    """Apply the pass to one chain, whether that pays or not; the match is checked."""
    mod, decisions = run_pass(given(chain), PASS, always_fuse=True, **ON_GPU)
    (decision,) = decisions
    assert decision.fused, str(decision.decline)
    return mod[chain.name], decision


@dataclass(frozen=True)
class Case:
    """A chain, the statements that it becomes, and what remains beside the kernel."""

    chain: Chain
    statements: str
    left: tuple[str, ...] = ()


def half(name: str, inputs: str, body: str, result: str, **sizes: int) -> Chain:
    return Chain(name, inputs, body, result, sizes, "float16")


CASES = [
    Case(
        half(
            "mlp",
            "x[b,s,32] W[32,48] p[48] V[48,32] q[32]",
            "h = R.nn.gelu(R.add(R.matmul(x, W), p)); y = R.add(R.add(R.matmul(h, V), q), x)",
            "y",
            b=2,
            s=9,
        ),
        """
        t0[m, p]    float32 = sum n: x0[m, n] * w0[n, p]
        t1[m, p]    float16 = gelu(t0[m, p] + x1[p])
        t2[m, s]    float32 = sum p: t1[m, p] * w1[p, s]
        out0[m, s]  float16 = t2[m, s] + x2[s] + x0[m, s]
        """,
    ),
    Case(
        half(
            "token_mixer",
            "x[3,40,48] W[40,32] p[32] V[32,40] q[40]",
            "t = R.permute_dims(x, [0, 2, 1]); h = R.nn.gelu(R.add(R.matmul(t, W), p))\n"
            "m = R.add(R.matmul(h, V), q); y = R.add(R.permute_dims(m, [0, 2, 1]), x)",
            "y",
        ),
        """
        t0[m, n, p]    float32 = sum k: x0[m, k, n] * w0[k, p]
        t1[m, n, p]    float16 = gelu(t0[m, n, p] + x1[p])
        t2[m, n, s]    float32 = sum p: t1[m, n, p] * w1[p, s]
        out0[m, s, n]  float16 = t2[m, n, s] + x2[s] + x0[m, s, n]
        """,
    ),
    Case(
        half(
            "three_products",
            "x[n,32] A[32,16] B[16,48] C[48,32]",
            "a = R.nn.relu(R.matmul(x, A)); b = R.tanh(R.matmul(a, B)); y = R.matmul(b, C)",
            "y",
            n=21,
        ),
        """
        t0[m, h]    float32 = sum k: x0[m, k] * w0[k, h]
        t1[m, h]    float16 = relu(t0[m, h])
        t2[m, q]    float32 = sum h: t1[m, h] * w1[h, q]
        t3[m, q]    float16 = tanh(t2[m, q])
        t4[m, s]    float32 = sum q: t3[m, q] * w2[q, s]
        out0[m, s]  float16 = t4[m, s]
        """,
    ),
    Case(
        half(
            "norm_in_front",
            "x[20,32] g[32] A[32,48] B[48,16] C[16,32]",
            "n = R.nn.rms_norm(x, g, axes=[-1]); a = R.nn.relu(R.matmul(n, A))\n"
            "b = R.nn.relu(R.matmul(a, B)); y = R.matmul(b, C)",
            "y",
        ),
        """
        t0[m]       float32 = sum k: x0[m, k] * x0[m, k]
        t1[m, k]    float16 = (x0[m, k] * rsqrt(t0[m] / 32 + 1e-05)) * x1[k]
        t2[m, p]    float32 = sum k: t1[m, k] * w0[k, p]
        t3[m, p]    float16 = relu(t2[m, p])
        t4[m, r]    float32 = sum p: t3[m, p] * w1[p, r]
        t5[m, r]    float16 = relu(t4[m, r])
        t6[m, t]    float32 = sum r: t5[m, r] * w2[r, t]
        out0[m, t]  float16 = t6[m, t]
        """,
    ),
    Case(
        half(
            "norm_between",
            "x[20,32] A[32,48] g[48] B[48,16] r[20,48]",
            "s = R.add(R.matmul(x, A), r); h = R.nn.rms_norm(s, g, axes=[-1])\n"
            "y = R.matmul(R.nn.silu(h), B)",
            "y",
        ),
        """
        t0[m, h]    float32 = sum k: x0[m, k] * w0[k, h]
        t1[m, h]    float16 = t0[m, h] + x1[m, h]
        t2[m]       float32 = sum h: t1[m, h] * t1[m, h]
        t3[m, h]    float16 = silu((t1[m, h] * rsqrt(t2[m] / 48 + 1e-05)) * x2[h])
        t4[m, t]    float32 = sum h: t3[m, h] * w1[h, t]
        out0[m, t]  float16 = t4[m, t]
        """,
    ),
    Case(
        half(
            "softmax_between",
            "x[2,16,32] A[2,32,48] m[2,16,48] B[2,48,16] w[16,16]",
            "s = R.add(R.multiply(R.matmul(x, A), R.const(0.25, 'float16')), m)\n"
            "p = R.nn.softmax(R.nn.relu(s), axis=-1); y = R.matmul(R.matmul(p, B), w)",
            "y",
        ),
        """
        t0[m, k, q]      float32 = sum n: x0[m, k, n] * w0[m, n, q]
        t1[m, k, q]      float32 = relu(t0[m, k, q] * 0.25 + x1[m, k, q])
        t2[m, k]         float32 = max q: t1[m, k, q]
        t3[m, k, q]      float32 = exp(t1[m, k, q] - finite(t2[m, k]))
        t4[m, k]         float32 = sum q: t3[m, k, q]
        t5[m, k, w]      float32 = sum q: t3[m, k, q] * w1[m, q, w]
        t6[m, k, w]      float16 = t5[m, k, w] / t4[m, k]
        t7[m, k, a13]    float32 = sum w: t6[m, k, w] * w2[w, a13]
        out0[m, k, a13]  float16 = t7[m, k, a13]
        """,
    ),
    Case(
        half(
            "adapter",
            "x[n,32] base[n,48] A[16,32] B[48,16]",
            "l = R.matmul(R.matmul(x, R.permute_dims(A)), R.permute_dims(B))\n"
            "m = R.multiply(R.max(l, axis=[1], keepdims=True), R.const(2.0, 'float16'))\n"
            "y = R.nn.silu(R.add(base, m))",
            "y",
            n=17,
        ),
        """
        t0[n, m]    float32 = sum h: x0[n, h] * w0[m, h]
        t1[n, m]    float16 = t0[n, m]
        t2[n, p]    float32 = sum m: t1[n, m] * w1[p, m]
        t3[n]       float32 = max p: t2[n, p]
        out0[r, s]  float16 = silu(x1[r, s] + t3[r] * 2)
        """,
    ),
    Case(
        half(
            "rounded",
            "x[24,32] A[32,16] B[16,48]",
            "h = R.nn.gelu(R.matmul(x, A, out_dtype='float32')); c = R.astype(h, 'float16')\n"
            "y = R.nn.softmax(R.astype(R.matmul(c, B), 'float32'))",
            "y",
        ),
        """
        t0[m, h]    float32 = sum k: x0[m, k] * w0[k, h]
        t1[m, h]    float16 = gelu(t0[m, h])
        t2[m, q]    float32 = sum h: t1[m, h] * w1[h, q]
        t3[m]       float32 = max q: t2[m, q]
        t4[m, q]    float32 = exp(t2[m, q] - finite(t3[m]))
        t5[m]       float32 = sum q: t4[m, q]
        out0[m, q]  float32 = t4[m, q] / t5[m]
        """,
    ),
    Case(
        half(
            "mean_behind",
            "x[24,32] A[32,16] B[16,48] C[24,48]",
            "y = R.matmul(R.exp(R.matmul(x, A)), B); m = R.mean(y, axis=[1], keepdims=True)\n"
            "z = R.multiply(R.subtract(y, m), C)",
            "z",
        ),
        """
        t0[m, h]    float32 = sum k: x0[m, k] * w0[k, h]
        t1[m, h]    float16 = exp(t0[m, h])
        t2[m, q]    float32 = sum h: t1[m, h] * w1[h, q]
        t3[m]       float32 = sum q: t2[m, q]
        out0[m, q]  float16 = (t2[m, q] - (t3[m] / 48)) * x1[m, q]
        """,
    ),
    Case(
        half(
            "side_by_side",
            "x[24,32] A[32,16] B[32,16] C[16,48]",
            "a = R.nn.silu(R.matmul(x, A)); b = R.matmul(x, B)\ny = R.matmul(R.multiply(a, b), C)",
            "y",
        ),
        """
        t0[m, h]    float32 = sum k: x0[m, k] * w0[k, h]
        t1[m, q]    float32 = sum k: x0[m, k] * w1[k, q]
        t2[m, h]    float16 = silu(t0[m, h]) * t1[m, h]
        t3[m, s]    float32 = sum h: t2[m, h] * w2[h, s]
        out0[m, s]  float16 = t3[m, s]
        """,
    ),
    Case(
        half(
            "batched",
            "x[b,n,32] A[b,32,16] B[b,16,48]",
            "h = R.clip(R.matmul(x, A), 0, 6); y = R.sqrt(R.nn.relu(R.matmul(h, B)))",
            "y",
            b=2,
            n=9,
        ),
        """
        t0[m, k, q]    float32 = sum n: x0[m, k, n] * w0[m, n, q]
        t1[m, k, q]    float16 = min(max(t0[m, k, q], 0), 6)
        t2[m, k, t]    float32 = sum q: t1[m, k, q] * w1[m, q, t]
        out0[m, k, t]  float16 = sqrt(relu(t2[m, k, t]))
        """,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.chain.name)
def test_a_region_becomes_one_kernel(case: Case) -> None:
    func, decision = fused(case.chain)
    work = decision.workload
    assert work is not None
    assert str(work.graph) == textwrap.dedent(case.statements).strip()
    assert sorted(c for c in calls(func) if c != "reshape") == sorted(("call_tir", *case.left))
    assert from_json(to_json(work)) == work


@pytest.fixture(scope="module")
def planned() -> Iterator[Interpreter]:
    worker = Interpreter(check_plan)
    yield worker
    worker.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.chain.name)
def test_numbers_in_the_interpreter(case: Case, planned: Interpreter) -> None:
    """The first and the last plan that are offered, for fewer rows than a tile has and for more."""
    work = fused(case.chain)[1].workload
    assert work is not None
    offered = candidates(work, device_of(H200), "triton")
    found = [p for p in offered if isinstance(p, GeneratedPlan)]
    for plan, rows in zip((found[0], found[-1]), (3, 21), strict=True):
        sizes = {name: rows if name == "rows" else 2 for name in work.graph.dims}
        assert planned(work, plan, sizes) == "", plan.text


LEFT = {
    "attention": half(
        "attention",
        "q[4,64,32] k[4,64,32] v[4,64,32]",
        "s = R.matmul(q, R.permute_dims(k, [0, 2, 1])); y = R.matmul(R.nn.softmax(s), v)",
        "y",
    ),
    "gated": half(
        "gated",
        "x[24,32] W[32,48] V[32,48]",
        "y = R.multiply(R.nn.silu(R.matmul(x, W)), R.matmul(x, V))",
        "y",
    ),
    "two_matmuls": half(
        "two_matmuls", "x[24,32] W[32,16] V[16,48]", "y = R.matmul(R.matmul(x, W), V)", "y"
    ),
    "one_matmul": half("one_matmul", "x[24,32] W[32,16]", "y = R.nn.gelu(R.matmul(x, W))", "y"),
    "read_elsewhere": half(
        "read_elsewhere",
        "x[24,32] W[32,16] V[16,48]",
        "h = R.tanh(R.matmul(x, W)); y = R.matmul(h, V)",
        "(h, y)",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_region_or_has_a_pattern(name: str) -> None:
    mod = given(LEFT[name])
    out, decisions = run_pass(mod, PASS, always_fuse=True, **ON_GPU)
    tvm.ir.assert_structural_equal(out, mod)
    assert decisions == []


def test_tir_has_no_such_kernels() -> None:
    mod = given(CASES[0].chain)
    out, decisions = run_pass(mod, PASS, target=H200, always_fuse=True)
    tvm.ir.assert_structural_equal(out, mod)
    assert decisions == []


TWO = "h = R.tanh(R.tanh(R.matmul(x, W))); y = R.matmul(h, V)"
REFUSED = [
    (half("one_row", "x[1,32] W[32,16] V[16,48]", TWO, "y"), Reason.SHAPE, "0 of 2 matmuls"),
    (
        Chain("float32", "x[24,32] W[32,16] V[16,48]", TWO, "y"),
        *(Reason.NO_PLAN, "products are of float32"),
    ),
    (
        half(
            "split_rows",
            "x[24,32] W[32,16] V[8,48]",
            "h = R.nn.gelu(R.matmul(x, W)); y = R.matmul(R.reshape(h, [48, 8]), V)",
            "y",
        ),
        *(Reason.SHAPE, "rows of"),
    ),
    (
        half(
            "cubes",
            "x[24,32] W[32,16] V[16,48]",
            "h = R.power(R.matmul(x, W), R.const(3.0, 'float16')); y = R.matmul(h, V)",
            "y",
        ),
        *(Reason.ATTRIBUTE, "a power is 3"),
    ),
    (
        half("wide", "x[64,4096] W[4096,8192] V[8192,4096]", TWO, "y"),
        *(Reason.NOT_PROFITABLE, "fused"),
    ),
]


@pytest.mark.parametrize(
    ("chain", "reason", "words"), REFUSED, ids=lambda c: getattr(c, "name", "")
)
def test_refusals(chain: Chain, reason: Reason, words: str) -> None:
    mod = given(chain)
    out, (decision,) = run_pass(mod, PASS, **ON_GPU)
    tvm.ir.assert_structural_equal(out, mod)
    assert decision.decline is not None
    assert decision.decline.reason is reason and words in decision.decline.detail


def test_a_workload_that_is_no_graph() -> None:
    text = to_json(fused(CASES[0].chain)[1].workload)
    for wrong in (text.replace("gelu", "gilu"), text.replace('"blocks"', '"bricks"')):
        with pytest.raises(LoweringError, match="statements are no block graph"):
            from_json(wrong)
