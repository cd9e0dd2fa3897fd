"""FuseMatmulChain: which chains it takes, what it leaves, numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm

from relax_fusion import DynamicDim, MatmulChain, Reason, Report
from relax_fusion.hardware.target import make_target

from ..support.chains import Chain, assert_numbers, calls, compiled, kernel_args, module, run_pass

PASS = "FuseMatmulChain"
TWO = "h = R.matmul(x, A); y = R.matmul(h, B)"
NT = "a = R.permute_dims(A); b = R.permute_dims(B); h = R.matmul(x, a); m = R.matmul(h, b)\n"


def work(
    rows: int | DynamicDim = 6,
    inner: tuple[str | float, ...] = (),
    outer: tuple[str | float, ...] = (),
    layouts: tuple[str, str] = ("kn", "kn"),
    **others: object,
) -> MatmulChain:
    fields = {"dtype": "float32", "out_dtype": "float32", **others}
    return MatmulChain(rows, 32, 8, 48, layouts, inner, outer, **fields)


REWRITES = [
    (Chain("alone", "x[6,32] A[32,8] B[8,48]", TWO, "y"), work(), "x A B"),
    (
        Chain(
            "lora",
            "x[b,s,32] A[8,32] B[48,8] base[b,s,48]",
            NT + "u = R.multiply(m, R.const(2.0)); y = R.add(base, u)",
            "y",
            {"b": 2, "s": 9},
        ),
        work(DynamicDim("b * s"), outer=(2.0, "residual"), layouts=("nk", "nk")),
        "x A B base",
    ),
    (
        Chain(
            "bottleneck",
            "x[b,32] A[8,32] p[8] B[48,8] q[48] r[b,48]",
            "a = R.permute_dims(A); b = R.permute_dims(B); h = R.add(R.matmul(x, a), p)\n"
            "g = R.nn.gelu(h); m = R.add(R.matmul(g, b), q); y = R.add(m, r)",
            "y",
            {"b": 21},
        ),
        work(
            *(DynamicDim("b"), ("bias", "gelu"), ("bias", "residual")),
            layouts=("nk", "nk"),
        ),
        "x A p B q r",
    ),
    (
        Chain(
            "scaled_inside",
            "x[6,32] A[32,8] B[48,8]",
            "h = R.matmul(x, A); g = R.divide(h, R.const(4.0)); f = R.nn.relu(g)\n"
            "y = R.matmul(f, R.permute_dims(B))",
            "y",
        ),
        work(inner=(0.25, "relu"), layouts=("kn", "nk")),
        "x A B",
    ),
    (
        Chain("half", "x[6,32] A[32,8] B[8,48]", TWO, "y", dtype="float16"),
        work(dtype="float16", out_dtype="float16"),
        "x A B",
    ),
    (
        Chain(
            "rounded_between",
            "x[6,32] A[32,8] B[8,48]",
            'h = R.matmul(x, A, out_dtype="float32"); c = R.astype(h, "bfloat16")\n'
            'm = R.matmul(c, B); y = R.astype(m, "float32")',
            "y",
            dtype="bfloat16",
        ),
        work(dtype="bfloat16"),
        "x A B",
    ),
    (
        Chain("batched", "x[5,6,32] A[5,32,8] B[5,8,48]", TWO, "y"),
        work(batch=5),
        "x A B",
    ),
    (
        Chain(
            "batch_of_heads",
            "x[b,3,m,32] A[b,3,8,32] B[b,3,8,48] r[b,3,m,48]",
            "a = R.permute_dims(A, [0, 1, 3, 2]); h = R.matmul(x, a); n = R.matmul(h, B)\n"
            "y = R.add(n, r)",
            "y",
            {"b": 2, "m": 7},
        ),
        work(
            DynamicDim("m"),
            outer=("residual",),
            layouts=("nk", "kn"),
            batch=DynamicDim("b * T.int64(3)"),
        ),
        "x A B r",
    ),
    (
        Chain(
            "regrouped_rows",
            "x[2,3,32] A[32,8] B[8,48]",
            "f = R.reshape(x, [6, 32]); h = R.matmul(f, A); g = R.reshape(h, [2, 3, 8])\n"
            "k = R.reshape(g, [6, 8]); y = R.matmul(k, B)",
            "y",
        ),
        work(),
        "x A B",
    ),
]


@pytest.mark.parametrize("case", REWRITES, ids=lambda c: c[0].name)
def test_rewrites(case: tuple[Chain, MatmulChain, str]) -> None:
    chain, wanted, args = case
    mod, decisions = run_pass(module([chain]), PASS, always_fuse=True)
    (decision,) = decisions
    assert decision.workload == wanted
    func = mod[chain.name]
    assert " ".join(kernel_args(func)) == args
    assert [c for c in calls(func) if c != "reshape"] == ["call_tir"]


def test_a_third_matmul_stays() -> None:
    body = "h = R.matmul(x, A); m = R.matmul(h, B); y = R.matmul(m, C)"
    chain = Chain("three", "x[6,32] A[32,8] B[8,48] C[48,32]", body, "y")
    mod, decisions = run_pass(module([chain]), PASS, always_fuse=True)
    assert [d.where for d in decisions if d.fused] in (["m"], ["y"])
    assert sorted(calls(mod["three"])) == ["call_tir", "matmul"]


# --- declines --------------------------------------------------------------------------------

INPUTS = "x[6,32] A[32,8] B[8,48]"
DECLINES = [
    ("read_twice", INPUTS + " C[8,4]", TWO + "; z = R.matmul(h, C)", "y, z", Reason.MULTI_USE, "h"),
    ("returned", INPUTS, TWO, "h, y", Reason.LEAKED, "h is a result"),
    (
        "read_by_another_step",
        INPUTS,
        TWO + "; z = R.negative(h)",
        "y, z",
        Reason.MULTI_USE,
        "h is read by",
    ),
    (
        "widened_between",
        "x[6,32]:float16 A[32,8]:float16 B[8,48]",
        'h = R.matmul(x, A, out_dtype="float32"); y = R.matmul(h, B)',
        "y",
        Reason.DTYPE,
        "the intermediate is float32, the input float16",
    ),
    ("no_rows", "x[0,32] A[32,8] B[8,48]", TWO, "y", Reason.SHAPE, "no rows"),
    ("no_matrices", "x[0,6,32] A[0,32,8] B[0,8,48]", TWO, "y", Reason.SHAPE, "no rows"),
    (
        "float64",
        "x[6,32]:float64 A[32,8]:float64 B[8,48]:float64",
        TWO,
        "y",
        Reason.DTYPE,
        "float64",
    ),
]


@pytest.mark.parametrize("case", DECLINES, ids=lambda c: c[0])
def test_declines(case: tuple[str, str, str, str, Reason, str]) -> None:
    name, inputs, body, result, reason, words = case
    mod = module([Chain(name, inputs, body, result)])
    out, decisions = run_pass(mod, PASS, always_fuse=True)
    tvm.ir.assert_structural_equal(out, mod)
    assert {d.decline.reason for d in decisions} == {reason}
    assert words in decisions[0].decline.detail


UNTOUCHED = [
    ("one_matmul", "x[6,32] A[32,8]", "y = R.nn.relu(R.matmul(x, A))"),
    ("behind_a_norm", INPUTS + " g[32]",
     "n = R.nn.rms_norm(x, g, axes=[-1]); h = R.matmul(n, A); y = R.matmul(h, B)"),
    ("behind_a_norm_of_rows", "x[2,3,32] A[32,8] B[8,48] g[32]",
     "n = R.nn.rms_norm(x, g, axes=[-1]); f = R.reshape(n, [6, 32]); h = R.matmul(f, A)\n"
     "y = R.matmul(h, B)"),
    ("as_a_weight", "x[6,32] A[32,8] B[4,6]", "h = R.matmul(x, A); y = R.matmul(B, h)"),
    ("softmax_between", INPUTS, "h = R.nn.softmax(R.matmul(x, A)); y = R.matmul(h, B)"),
    ("dynamic_weight", "x[6,32] A[32,r] B[r,48]", TWO),
    ("batch_of_one_side", "x[5,6,32] A[5,32,8] B[8,48]", TWO),
    ("batch_that_broadcasts", "x[5,6,32] A[1,32,8] B[5,8,48]", TWO),
    ("residual_between", INPUTS + " r[6,8]",
     "h = R.add(R.matmul(x, A), r); y = R.matmul(h, B)"),
]  # fmt: skip


@pytest.mark.parametrize("case", UNTOUCHED, ids=lambda c: c[0])
def test_is_no_chain(case: tuple[str, str, str]) -> None:
    mod = module([Chain(*case, "y")])
    out, decisions = run_pass(mod, PASS, always_fuse=True)
    tvm.ir.assert_structural_equal(out, mod)
    assert decisions == []


def test_a_wide_intermediate_is_not_fused() -> None:
    body = "h = R.nn.gelu(R.matmul(x, A)); y = R.matmul(h, B)"
    mod = module([Chain("mlp", "x[512,768] A[768,3072] B[3072,768]", body, "y")])
    target = tvm.target.Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 8})
    out, (decision,) = run_pass(mod, PASS, target=target)
    tvm.ir.assert_structural_equal(out, mod)
    assert decision.decline.reason is Reason.NOT_PROFITABLE
    assert decision.decline.fused_s > decision.decline.unfused_s


def test_a_gpu_has_no_kernel_for_float32() -> None:
    mod = module([Chain("alone", INPUTS, TWO, "y")])
    _, (decision,) = run_pass(mod, PASS, target=make_target("h200"), always_fuse=True)
    assert decision.decline.reason is Reason.NO_PLAN


# --- numbers ---------------------------------------------------------------------------------

RUN = ("lora", "bottleneck", "rounded_between", "batch_of_heads", "regrouped_rows")
CHAINS = [case[0] for case in REWRITES if case[0].name in RUN]


@pytest.fixture(scope="module")
def machine():
    mod, report = module(CHAINS), Report()
    vm = compiled(mod, CHAINS, always_fuse=True, report=report, disable=("FuseChains",))
    taken = [d for d in report.decisions if d.fused and d.pattern == PASS]
    assert len(taken) == len(CHAINS)
    return vm, mod


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)


@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("rows", [16, 256, 4096])
def test_on_hopper_two_launches_are_faster_where_rows_or_weights_are_many(
    rank: int, rows: int
) -> None:
    """And each is of the family whose tiles fit narrow matmuls, at least where it has few rows."""
    sizes = f"x[{rows},4096] A[{rank},4096] B[14336,{rank}]"
    chain = Chain("adapter", sizes, NT + "y = R.multiply(m, R.const(2.0, 'float16'))", "y")
    options = {"target": make_target("h200"), "backend": "triton", "validate": False}
    mod = module([replace(chain, dtype="float16")])
    mod, (declined,) = run_pass(mod, PASS, **options)
    assert declined.decline.reason is Reason.NOT_PROFITABLE
    _, apart = run_pass(mod, "FuseMatmulEpilogue", **options)
    families = [{plan.family for _, plan in d.plans.entries} for d in apart]
    assert families[0] == {"cuda"} and len(families) == 2
    assert families[1] == {"cuda"} or rows > 64
