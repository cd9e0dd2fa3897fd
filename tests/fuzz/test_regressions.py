"""Programs that once went wrong, each as small as it could be made."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm import relax, tirx

from relax_fusion import PATTERNS, FuseOptions, Reason, host_target
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.matching.axes import quotient
from relax_fusion.passes import FusePatterns
from relax_fusion.workload import Norm, NormMatmul, Projection

from ..support.chains import Chain, assert_declined, assert_numbers, compiled, fused, module
from ..support.contraction_cases import Case
from . import kernels

ATTENTION = "FuseAttentionChain"
LAYER = Norm("layer", 1e-3, beta=True)
SUM = Norm("rms", 1e-3, residual=True)
TILE = TilePlan(16, 16, 8, reg_m=4, reg_n=4, lanes=8, family="cpu_tiles")


def work(norm: Norm | None, k: int, *steps: str) -> NormMatmul:
    return NormMatmul(17, k, (Projection(16, "kn", steps),), norm, "float32", "float32")


def test_kernels() -> None:
    """Widths that lanes do not divide; roundings to bfloat16 that TVM drops within a function."""
    brain = {"dtype": "bfloat16", "out_dtype": "float32"}
    works = [work(norm, k) for norm in (LAYER, SUM) for k in (12, 17, 24)]
    works.append(replace(work(SUM, 40), **brain))
    found = kernels.Findings()
    made = [
        kernels.Kernel(n, Case(str(w), w), PlanTable.single(replace(TILE, block_k=w.k)))
        for n, w in enumerate(works)
    ]
    for kernel, run in zip(made, kernels.compiled(made, found), strict=True):
        kernels.check(kernel, run)
    assert found.failures == []


ALIAS = Chain(
    "result_under_another_name",
    "q[8,3,2,4] k[8,2,3,4] v[8,2,3,3]",
    "u = R.permute_dims(v, axes=[0, 2, 1, 3]); t = R.permute_dims(k, axes=[0, 2, 3, 1])\n"
    "s = R.matmul(q, t); p = R.nn.softmax(s, axis=3); o = R.matmul(p, u)\n"
    "y = R.permute_dims(o, axes=[0, 2, 1, 3]); z = y",
    "z",
)
SINK = Chain(
    "hidden_keys_of_a_query_that_is_not_a_number",
    "q[2,4,1,8] k[2,4,1,8] v[2,4,1,8] h[1,1]:bool a[4]",
    "t = R.permute_dims(k, axes=[0, 1, 3, 2]); s = R.matmul(q, t); n = R.logical_not(h)\n"
    'w = R.where(n, R.const(0.0, "float32"), R.const(-1e999, "float32")); b = R.add(w, s)\n'
    "c = R.reshape(a, R.shape([1, 4, 1, 1])); e = R.broadcast_to(c, R.shape([2, 4, 1, 1]))\n"
    "f = R.concat((b, e), axis=3); p = R.nn.softmax(f, axis=-1)\n"
    "g = R.strided_slice(p, axes=[3], begin=[0], end=[1]); y = R.matmul(g, v)",
    "y",
)
PADDING = Chain(
    "mask_read_once_as_hiding_and_once_as_a_number",
    "q[3,2,1,5] k[3,2,5,1] v[3,2,1,5] h[1,1]:bool",
    's = R.matmul(q, k); n = R.where(h, R.const(0.0, "float32"), R.const(-1e4, "float32"))\n'
    "b = R.add(n, s); p = R.nn.softmax(b, axis=-1); y = R.matmul(p, v)",
    "y",
)
REPLACED = Chain(
    "least_number_in_front_of_a_bias",
    "q[3,2,5,4] k[3,2,8,4] v[3,2,8,4] h[5,8]:bool a[2,5,8]",
    "t = R.permute_dims(k, axes=[0, 1, 3, 2]); s = R.matmul(q, t)\n"
    'm = R.where(h, R.const(-3.4e38, "float32"), s); b = R.add(m, a)\n'
    "p = R.nn.softmax(b, axis=-1); y = R.matmul(p, v)",
    "y",
)
NO_KEYS = Chain(
    "no_keys",
    "q[2,2,3,4] k[2,2,0,4] v[2,0,2,4]",
    "t = R.permute_dims(k, axes=[0, 1, 3, 2]); s = R.matmul(q, t)\n"
    "p = R.nn.softmax(s, axis=-1); u = R.permute_dims(v, axes=[0, 2, 1, 3])\n"
    "y = R.matmul(p, u)",
    "y",
)


DEAD = Chain(
    "part_of_heads_that_leads_nowhere",
    "x[1,5,24] w[24,8] c[1,5,1,8] d[1,5,1,8]",
    "m = R.matmul(x, w); h = R.reshape(m, R.shape([1, 5, 1, 8]))\n"
    "u = R.strided_slice(h, axes=[3], begin=[0], end=[2]); dead = R.expand_dims(u, axis=[0])\n"
    "e = R.strided_slice(h, axes=[3], begin=[0], end=[8], strides=[2])\n"
    "o = R.strided_slice(h, axes=[3], begin=[1], end=[8], strides=[2]); n = R.negative(o)\n"
    "p = R.stack((n, e), axis=-1); r = R.reshape(p, R.shape([1, 5, 1, 8]))\n"
    "y = R.add(R.multiply(h, c), R.multiply(r, d))",
    "y",
)
ONE_TENSOR = Chain(
    "queries_and_keys_of_one_tensor",
    "x[3,5,24] v[3,5,2,4]",
    "a = R.strided_slice(x, axes=[2], begin=[0], end=[8])\n"
    "b = R.strided_slice(x, axes=[2], begin=[8], end=[16])\n"
    "c = R.reshape(a, R.shape([3, 5, 2, 4])); d = R.reshape(b, R.shape([3, 5, 2, 4]))\n"
    "q = R.permute_dims(c, axes=[0, 2, 1, 3]); k = R.permute_dims(d, axes=[0, 2, 3, 1])\n"
    's = R.matmul(q, k); t = R.multiply(s, R.const(0.25, "float16"))\n'
    'm = R.where(R.tril(R.ones([5, 5], "bool")), t, R.const(-65504.0, "float16"))\n'
    "p = R.nn.softmax(m, axis=-1); y = R.matmul(p, R.permute_dims(v, axes=[0, 2, 1, 3]))",
    "y",
    dtype="float16",
)
MIXED = Chain(
    "keys_hidden_by_minus_infinity_and_by_the_least_number",
    "q[2,3,8,4] k[2,3,2,4] v[2,3,2,4] a[2,1,1,2]:bool h[8,2]:bool b[3,8,2]",
    "s = R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2]))\n"
    'm = R.where(a, s, R.const(-1e999, "float32"))\n'
    'n = R.where(h, R.const(-3.4e38, "float32"), m); c = R.add(n, b)\n'
    "p = R.nn.softmax(c, axis=-1); y = R.matmul(p, v)",
    "y",
)


def test_another_name_of_a_transposed_result() -> None:
    """What made the tensor was done again for its other name."""
    fused(ALIAS, ATTENTION)  # which is validated


@pytest.mark.parametrize("chain", [PADDING, REPLACED, MIXED, ONE_TENSOR], ids=lambda c: c.name)
def test_numbers_of_masks(chain: Chain) -> None:
    fused(chain, ATTENTION)  # which is validated


def test_what_leads_nowhere_may_differ() -> None:
    """A slice that only a dead reshape read was held against heads that a kernel rotates."""
    fused(DEAD, "FuseMatmulEpilogue")


def test_hidden_keys_and_a_sink() -> None:
    """NaN in a query that sees no key was held against a kernel, which gives zeros."""
    fused(SINK, ATTENTION)


def test_attention_over_nothing() -> None:
    """Reshapes of no elements were read as if they told which axis is which."""
    assert_declined(module([NO_KEYS]), ATTENTION, Reason.SHAPE, "there are no keys")
    assert quotient(tirx.Var("s", "int64"), 0) is None


@pytest.mark.parametrize(("dtype", "out"), [("float32", "None"), ("float16", '"float32"')])
def test_nt_matmul_of_tvm_is_recognised(dtype: str, out: str) -> None:
    """Comparing the PrimFunc raised an error, and index types then made it differ."""
    body = f"t = R.permute_dims(W); y = R.matmul(x, t, out_dtype={out})"
    chain = Chain("main", "x[b,8] W[4,8]", body, "y", dtype=dtype)
    decisions: list = []
    options = FuseOptions(target=host_target(), decisions=decisions, always_fuse=True)
    PATTERNS["FuseMatmulEpilogue"](options)(relax.transform.FuseTransposeMatmul()(module([chain])))
    assert [d.fused for d in decisions] == [True]


def test_what_no_pass_of_ours_takes() -> None:
    """A shared transpose made TVM's pass raise; a default scale was taken for a number."""
    chains = [
        Chain("shared", "x[3,8] W[4,8]", "t = R.permute_dims(W); m = R.matmul(x, t)\n"
              "n = R.negative(x); o = R.matmul(n, t)", "(m, o, t)"),
        Chain("unscaled", "q[1,3,2,4] k[1,3,2,4] v[1,3,2,4]", "o = R.nn.attention(q, k, v)", "o"),
    ]  # fmt: skip
    mod = module(chains)
    machine = compiled(mod, chains, disable=tuple(PATTERNS))
    for chain in chains:
        assert_numbers(machine, mod, chain)


def test_biases_of_no_queries_are_not_made() -> None:
    """A bias that is computed of two tensors was reshaped before anything counted queries."""
    body = "b = R.multiply(c, a); s = R.add(R.matmul(q, R.permute_dims(k, [0, 1, 3, 2])), b)\n"
    inputs = "q[1,4,0,8] k[1,4,5,8] v[1,4,5,8] a[4,1,1] c[0,5]"
    chain = Chain("main", inputs, body + "y = R.matmul(R.nn.softmax(s), v)", "y")
    decisions: list = []
    options = FuseOptions(target=host_target(), decisions=decisions, always_fuse=True)
    PATTERNS["FuseAttentionChain"](options)(module([chain]))
    assert [d.decline.detail for d in decisions] == ["there are no queries"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_reshape_of_what_another_kernel_computes_inside(dtype: str) -> None:
    """The rows of a residual were read in front of the reshape, which a chain had taken."""
    body = "m = R.matmul(x, w); h = R.reshape(R.matmul(x, a), R.shape([b * 8, 4]))\n"
    body += "u = R.reshape(R.matmul(h, c), R.shape([b, 8, 16])); t = u; y = R.add(m, t)"
    inputs = "x[b,8,16] w[16,16] a[16,4] c[4,16]"
    mod = module([Chain("main", inputs, body, "y", dtype=dtype)])
    options = FuseOptions(target=host_target(), always_fuse=True, decisions=[])
    made = FusePatterns(options)(mod)
    assert [d.pattern for d in options.decisions if d.fused] == ["FuseChains", "FuseMatmulEpilogue"]
    relax.analysis.well_formed(made)  # which raises


def replaced(*steps: str) -> Chain:
    """Return attention whose scores, within 1, go through steps."""
    number = {"hidden": ("h", "-1e999"), "replaced": ("g", "-100.0")}
    masked = [f'R.where({number[n][0]}, SCORES, R.const({number[n][1]}, "float32"))' for n in steps]
    body = "s = R.tanh(R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2])))\n"
    body += "".join(
        f"s{i} = {t.replace('SCORES', f's{i - 1}' if i else 's')}\n" for i, t in enumerate(masked)
    )
    inputs = "q[2,3,8,4] k[2,3,8,4] v[2,3,8,4] h[8,8]:bool g[8,8]:bool"
    return Chain("_then_".join(steps), inputs, body + "y = R.matmul(R.nn.softmax(s1), v)", "y")


def test_numbers_in_the_place_of_hidden_scores() -> None:
    """Where a query sees no key, what a number replaced has all weight; a kernel hid it."""
    fused(replaced("replaced", "hidden"), ATTENTION)  # which is validated
    detail = "scores of keys that are hidden already are replaced"
    assert_declined(module([replaced("hidden", "replaced")]), ATTENTION, Reason.ATTRIBUTE, detail)
