"""docs/numerics.md: a finite number hides keys where that is proved, and else is a number."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest

from relax_fusion.workload.reference import evaluate as reference

from ..support.attention_chains import PASS, attention, const, positions
from ..support.chain_reference import evaluate
from ..support.chains import Chain, compiled, module, outputs, run_pass

LEAST, LOWEST, MANY, FEW = -3.4028234663852886e38, -65504.0, -1e9, -1e4
SIX = "q[2,2,6,8] k[2,2,6,8] v[2,2,6,8]"
PADDED = SIX + " pad[2,6]:int64"
CAUSAL = positions("6", "6") + "c = R.less_equal(j, i)\n"


@dataclass(frozen=True)
class Case:
    """An attention whose rows of queries 0 and 1 see only padding, and scores as large as `size`.

    `said` is what the workload has of ``causal``, ``bias``, ``min`` and ``mask``, or why there is
    none.
    """

    name: str
    steps: str
    said: str
    inputs: str = SIX
    dtype: str = "float32"
    size: float = 1e5

    def __str__(self) -> str:
        """Name the test."""
        return self.name


def number(value: float, dtype: str = "float32") -> str:
    return const(value, dtype)


def causal(hidden: float, dtype: str = "float32", name: str = "m") -> str:
    """Return a causal mask of zeros and a number."""
    return CAUSAL + f"{name} = R.where(c, {const(0.0, dtype)}, {const(hidden, dtype)})\n"


def padding(hidden: float, dtype: str = "float32") -> str:
    """Return a mask that is made of the integers `pad`."""
    return (
        f'p0 = R.astype(pad, "{dtype}"); p1 = R.subtract({const(1.0, dtype)}, p0)\n'
        f"p2 = R.multiply(p1, {const(hidden, dtype)}); p = R.expand_dims(p2, axis=[1, 2])\n"
    )


def both(hidden: float, other: float) -> str:
    return causal(hidden) + padding(other) + "s1 = R.add(s0, p); s = R.add(s1, m)"


HALVES = f"s1 = R.multiply(s0, {const(0.125, 'float16')})\n"
CASES = [
    *(
        Case(f"causal by {hidden:g}", causal(hidden) + "s = R.add(s0, m)", said)
        for hidden, said in ((LEAST, "causal"), (-1e31, "causal"), (MANY, "bias"), (FEW, "bias"))
    ),
    Case("padding by -1e4 is a number", both(LEAST, FEW), "causal bias", PADDED),
    Case("two of -1e4", both(FEW, FEW), "bias", PADDED),
    Case("two of -1e9", both(MANY, MANY), "bias", PADDED),
    Case("two of the least", both(LEAST, LEAST), "bias", PADDED),
    Case("minus infinity and -1e4", both(float("-inf"), FEW), "causal bias", PADDED),
    Case(
        "two of -1e4 in one tensor",
        causal(FEW) + padding(FEW) + "b = R.add(p, m); s = R.add(b, s0)",
        "bias",
        PADDED,
    ),
    Case("three biases", both(FEW, FEW) + "\nz = R.add(s, y)", "bias", PADDED + " y[2,1,6]"),
    Case("scores replaced by the least", f"{CAUSAL}s = R.where(c, s0, {number(LEAST)})", "causal"),
    Case(
        "scores replaced by data",
        f"{padding(FEW)}h = R.less(p, {number(0.0)}); s = R.where(h, {number(LEAST)}, s0)",
        "mask",
        PADDED,
    ),
    Case(
        "scores and a mask replaced by the least",
        f"{causal(LEAST)}{padding(LEAST)}s1 = R.add(s0, p); s = R.where(c, s1, {number(LEAST)})",
        "bias",
        PADDED,
    ),
    Case("scores replaced by -1e9", f"{CAUSAL}s = R.where(c, s0, {number(MANY)})", "become -1e+09"),
    Case("scores replaced by 0", f"{CAUSAL}s = R.where(c, s0, {number(0.0)})", "become 0,"),
    Case(
        "a band that is no causal mask",
        positions("6", "6", -2)
        + f"c = R.less_equal(j, i); m = R.where(c, {number(0.0)}, {number(LEAST)})\n"
        + "s = R.add(s0, m)",
        "bias",
    ),
    Case("held at -1e4", f"s = R.maximum(s0, {number(FEW)})", "held back at -10000"),
    Case("held at 1e9", f"s = R.minimum(s0, {number(-MANY)})", "held back at 1e+09"),
    Case("held at both", "s = R.clip(s0, -1e4, 1e4)", "held back at -10000 and 10000"),
    Case("held at the least", f"s = R.maximum(s0, {number(LEAST)})", ""),
    Case(
        "held behind a causal mask",
        causal(LEAST) + f"s1 = R.add(s0, m); s = R.maximum(s1, {number(LEAST)})",
        "causal",
    ),
    Case(
        "held behind two masks",
        both(LEAST, LEAST).replace("s =", "s2 =") + f"\ns = R.maximum(s2, {number(LEAST)})",
        "bias",
        PADDED,
    ),
    Case(
        "held behind minus infinity",
        f"{padding(FEW)}h = R.less(p, {number(0.0)}); "
        f"s1 = R.where(h, {number(float('-inf'))}, s0); s = R.maximum(s1, {number(LEAST)})",
        "mask",
        PADDED,
    ),
    Case(
        "held behind a soft-cap",
        f"s1 = R.tanh(s0); s2 = R.multiply(s1, {number(9.0)}); s = R.clip(s2, -9, 10)",
        "",
    ),
    Case(
        "small scores behind a soft-cap",
        f"s1 = R.tanh(s0); s2 = R.multiply(s1, {number(9.0)})\n{causal(FEW)}s = R.add(s2, m)",
        "causal",
    ),
    Case(
        "half precision, scaled",
        f"{HALVES}{causal(LOWEST, 'float16')}s = R.add(s1, m)",
        "causal",
        dtype="float16",
        size=6e4,
    ),
    Case(
        "half precision, scaled and held",
        f"{HALVES}{causal(LOWEST, 'float16')}s2 = R.add(s1, m)\n"
        f"s = R.maximum(s2, {const(LOWEST, 'float16')})",
        "causal",
        dtype="float16",
        size=6e4,
    ),
    Case(
        "half precision",
        f"{causal(LOWEST, 'float16')}s = R.add(s0, m)",
        "bias",
        dtype="float16",
        size=6e4,
    ),
    Case(
        "half precision, held",
        f"s = R.maximum(s0, {const(LOWEST, 'float16')})",
        "",
        dtype="float16",
        size=6e4,
    ),
    Case(
        "half precision, replaced",
        f"{CAUSAL}s = R.where(c, s0, {const(LOWEST, 'float16')})",
        "min",
        dtype="float16",
        size=6e4,
    ),
    Case(
        "half precision, two masks held",
        f"{HALVES}{causal(LOWEST, 'float16')}{padding(LOWEST, 'float16')}s2 = R.add(s1, p)\n"
        f"s3 = R.add(s2, m); s = R.maximum(s3, {const(LOWEST, 'float16')})",
        "held back at -65504",
        PADDED,
        "float16",
    ),
]


HALF = [case for case in CASES if case.dtype == "float16"]
FAR = [case for case in CASES if case not in HALF and re.search(r"e\+?3[18]", case.steps)]


@pytest.mark.parametrize("case", FAR, ids=str)
def test_v1_beside_the_least_number_no_score_is_left(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", HALF, ids=str)
def test_v2_products_of_float16_are_finite(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", [c for c in CASES if c not in [*FAR, *HALF]], ids=str)
def test_v3_other_numbers_are_numbers(case: Case) -> None:
    check(case)


def test_v3_queries_that_see_padding_only_have_its_mean() -> None:
    chain = Chain("main", PADDED, attention(both(FEW, FEW)), "o")
    mod = module([chain])
    arrays = chain.arrays()
    arrays[3] = np.array([[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0]])
    (got,) = outputs(compiled(mod, always_fuse=True), "main", arrays)
    np.testing.assert_allclose(got, evaluate(mod["main"], arrays)[0], rtol=0, atol=2e-3)


def check(case: Case) -> None:
    scores = "z" if "z =" in case.steps else "s"
    chain = Chain("main", case.inputs, attention(case.steps, scores), "o", dtype=case.dtype)
    mod = module([chain])
    after, (decision,) = run_pass(mod, PASS)
    work = decision.workload
    if not decision.fused:
        assert case.said and case.said in decision.decline.detail
        return
    bias = "" if work.bias_dims is None else {"add": "bias", "min": "min"}[work.bias_op]
    causal = "causal" * (work.causal != "none")
    assert f"{causal} {bias} {'mask' * (work.mask_dims is not None)}".split() == case.said.split()

    def kernel(*args: np.ndarray) -> np.ndarray:
        named = zip((o.name for o in work.graph.inputs), args, strict=True)
        return reference(work.graph, dict(named), constants="float64")["out"]

    arrays = chain.arrays()
    largest = np.abs(np.einsum("bnqh,bnkh->bnqk", *(a.astype("f8") for a in arrays[:2]))).max()
    arrays[0] = (arrays[0].astype("float64") * (case.size / largest)).astype(arrays[0].dtype)
    if "pad" in case.inputs:
        arrays[3] = np.array([[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0]])
    wanted = evaluate(mod["main"], arrays)[0]
    got = evaluate(after["main"], arrays, {decision.kernel: kernel})[0]
    far = case in FAR and "bias" not in case.said  # queries that see no key give zeros
    seen = ~(far & (got == 0).all(-1))
    assert seen.mean() > 0.3
    np.testing.assert_allclose(got[seen], wanted[seen], rtol=0, atol=1e-6)
