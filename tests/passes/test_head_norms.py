"""Heads that are normalised behind their projection: in its kernel, or in one of their own."""

from __future__ import annotations

from itertools import product

import pytest
import tvm
from tvm import relax

import relax_fusion
from relax_fusion import Report

from ..support.chains import Chain, assert_numbers, compiled, module
from ..support.rope_chains import H, neighbours, turn
from ..support.slow import quick_if

EPS = "axes=[-1], epsilon=1e-3"
ANGLES = "c = R.expand_dims(C, axis=[1]); t = R.expand_dims(S, axis=[1])\n"
KINDS = ("heads", "rows", "plus", "half", "neighbours", "no_values", "no_norm_in_front")


def heads(name: str, width: int, kind: str, dtype: str) -> str:
    """Return a projection of h to heads of 16 features, which are normalised and rotated."""
    e, shape = name, f"R.shape([2, s, {width // 16}, 16])"
    gamma = f'R.add(g{e}, R.const(1, "{dtype}"))' if kind == "plus" else f"g{e}"
    lines = f"{e}m = R.matmul(h, W{e})\n"
    steps = [("w", f"R.reshape({{}}, {shape})"), ("n", f"R.nn.rms_norm({{}}, {gamma}, {EPS})")]
    source = f"{e}m"
    for step, formula in reversed(steps) if kind == "rows" else steps:
        lines += f"{e}{step} = {formula.format(source)}\n"
        source = f"{e}{step}"
    if kind == "neighbours":
        return lines.replace(" s,", " 6,") + neighbours(
            source, "c", "t", e, (2, 6, width // 16, 16)
        )
    return lines + turn(source, "c", "t", e)


def chain(kind: str, dtype: str = "float32") -> Chain:
    """Return queries, keys and values of some rows."""
    gammas = "gq[64] gk[32]" if kind == "rows" else "gq[16] gk[16]"
    rows, sizes = ("6", {}) if kind == "neighbours" else ("s", {"s": 6})
    x = "h" if kind == "no_norm_in_front" else "x"
    inputs = f"{x}[2,{rows},64] g[64] {gammas} C[{rows},16] S[{rows},16] Wq[64,64] Wk[64,32]"
    body = (
        ("" if x == "h" else H) + ANGLES + heads("q", 64, kind, dtype) + heads("k", 32, kind, dtype)
    )
    if kind == "no_values":
        return Chain(kind, inputs, body, "(q, k)", sizes, dtype)
    return Chain(
        kind, f"{inputs} Wv[64,32]", body + "v = R.matmul(h, Wv)\n", "(q, k, v)", sizes, dtype
    )


@pytest.mark.parametrize(
    ("kind", "dtype"),
    quick_if(
        lambda case: case in {("rows", "float16"), ("plus", "float16")} or case[1] == "float32",
        product(KINDS, ("float32", "float16")),
    ),
)
def test_one_kernel_of_a_cpu(kind: str, dtype: str) -> None:
    one, report = chain(kind, dtype), Report()
    mod = module([one])
    assert_numbers(compiled(mod, [one], report=report), mod, one)
    (coverage,) = report.coverage
    assert len(coverage.launches.kernels) == 1
    (work,) = (d.workload for d in report.fused)
    norms = [p.head_norm and p.head_norm.width for p in work.outputs]
    assert norms[:2] == ([64, 32] if kind == "rows" else [16, 16])
    assert coverage.chains["rope"] == (2, 2)


def test_one_kernel_behind_that_of_the_projections_on_a_gpu() -> None:
    report, target = Report(), relax_fusion.make_target("h200")
    pipeline = relax.get_pipeline("relax_fusion", target=target, report=report)
    with target, tvm.transform.PassContext(opt_level=3):
        pipeline(module([chain("heads", "float16")]))
    (coverage,) = report.coverage
    assert coverage.launches.kernels[-1] == "rms_norm_rotations"
    assert coverage.chains["rope"] == (2, 2)
    assert {x.kind for x in report.leftovers} == {"norm and rope"}
    reason = report.leftovers[0].reason
    assert reason.startswith(
        "one kernel normalises and rotates the heads of what FuseRMSNormMatmul"
    )
    assert "kernels of the family have no norm of heads behind a projection" in reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("R.const(1,", "R.const(0.5,"), "0.5 is added to gamma, 1 can be"),
        (("(q, k, v)", "(q, k, v, qm)"), "qm, which is to be rotated, is a result of the function"),
    ],
)
def test_heads_that_a_projection_leaves(change: tuple[str, str], words: str) -> None:
    one, report = chain("plus"), Report()
    fields = {name: getattr(one, name).replace(*change) for name in ("body", "result")}
    one = Chain(one.name, one.inputs, sizes=one.sizes, **fields)
    mod = module([one])
    assert_numbers(compiled(mod, [one], report=report), mod, one)
    left = [x for x in report.leftovers if x.kind == "norm and rope"]
    assert left and all(x.chain == "rope" for x in left)
    assert any(words in x.reason for x in left)
