"""FuseGatedFFN between reshapes, as exporters write rows of [batch, sequence, features]."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion import DynamicDim, GatedFFN

from ..support.chains import Chain, Rewrite, assert_numbers, calls, fused
from ..support.gated_chains import ACTIVATION_SPELLINGS, PASS, H, gated

# Behind the exporter of PyTorch the rows of [b, s, k] are one dimension around each matmul.
FLAT = "f = R.reshape({}, R.shape([b * s, 32])); f2 = R.reshape({}, R.shape([b * s, 32]))\n"
FLAT_TWO = FLAT + "p0 = R.matmul(f, Wg); u0 = R.matmul(f2, Wu)\n"
GROUPED = "p = R.reshape({}, R.shape([b, s, 48])); u = R.reshape({}, R.shape([b, s, 48]))\n"
EXPORTED = "x[b,s,32] g[32] Wg[32,48] Wu[32,48]"
SIZES = {"b": 2, "s": 5}


def exported(
    name: str, body: str, args: str, work: GatedFFN, inputs: str = EXPORTED, **options: str
) -> Rewrite:
    """Return a case behind reshapes; its kernel is of ``b * s`` rows."""
    return Rewrite(Chain(name, inputs, body, "y", SIZES, **options), work, args)


BS = DynamicDim("b * s")


def read_by_another(what: str, projection: str) -> Rewrite:
    """Return a case whose norm or reshape a further projection reads; the norm stays apart."""
    return Rewrite(
        Chain(
            f"exported_{what}_read_by_another_projection",
            EXPORTED + " Wo[32,16]",
            H + FLAT_TWO.format("h", "h") + GROUPED.format("p0", "u0") + "a = R.nn.silu(p)\n"
            f"y = R.multiply(a, u); {projection}",
            "(y, z)",
            SIZES,
        ),
        gated(rows=BS, norm=None),
        "h Wg Wu",
        ("matmul", "nn.rms_norm"),
    )


REWRITES = [
    *(
        exported(
            f"exported_{name}",
            H + FLAT_TWO.format("h", "h") + GROUPED.format("p0", "u0") + f"{text}\n"
            "y = R.multiply(a, u)",
            "x g Wg Wu",
            gated(activation, rows=BS),
        )
        for name, (activation, text) in ACTIVATION_SPELLINGS.items()
    ),
    exported(
        "exported_without_a_norm",
        FLAT_TWO.format("x", "x") + GROUPED.format("p0", "u0") + "a = R.nn.silu(p)\n"
        "y = R.multiply(u, a)",
        "x Wg Wu",
        gated(rows=BS, norm=None),
        "x[b,s,32] Wg[32,48] Wu[32,48]",
    ),
    exported(
        "exported_biases_in_front_and_behind",
        H
        + FLAT_TWO.format("h", "h")
        + "p1 = R.add(c, p0)\n"
        + GROUPED.format("p1", "u0")
        + "u2 = R.add(u, d); a = R.nn.gelu(p); y = R.multiply(a, u2)",
        "x g Wg Wu c d",
        gated("gelu", rows=BS, bias=True),
        EXPORTED + " c[48] d[48]",
    ),
    exported(
        "exported_shared_reshape",
        H
        + "f = R.reshape(h, R.shape([b * s, 32])); p0 = R.matmul(f, Wg); u0 = R.matmul(f, Wu)\n"
        + GROUPED.format("p0", "u0")
        + "a = R.nn.silu(p); y = R.multiply(a, u)",
        "x g Wg Wu",
        gated(rows=BS),
    ),
    exported(
        "exported_merged",
        H + "f = R.reshape(h, R.shape([b * s, 32])); m = R.matmul(f, W)\n"
        "r = R.reshape(m, R.shape([b, s, 96])); p = R.split(r, [48], axis=-1)\n"
        "a = p[0]; b1 = p[1]; s1 = R.nn.silu(a); y = R.multiply(s1, b1)",
        "x g W",
        gated(rows=BS, merged=True),
        "x[b,s,32] g[32] W[32,96]",
    ),
    exported(
        "exported_merged_and_halved",
        "f = R.reshape(x, R.shape([b * s, 32])); m = R.matmul(f, W)\n"
        "p = R.split(m, 2, axis=-1); a = p[0]; u = p[1]; s1 = R.nn.silu(a); y = R.multiply(s1, u)",
        "x W",
        gated(rows=BS, merged=True, norm=None),
        "x[b,s,32] W[32,96]",
    ),
    exported(
        "exported_activation_before_the_reshape",
        FLAT_TWO.format("x", "x")
        + "a0 = R.nn.silu(p0)\n"
        + GROUPED.format("a0", "u0")
        + "y = R.multiply(p, u)",
        "x Wg Wu",
        gated(rows=BS, norm=None),
        "x[b,s,32] Wg[32,48] Wu[32,48]",
    ),
    exported(
        "exported_float16",
        H
        + FLAT.format("h", "h")
        + 'p0 = R.matmul(f, Wg, out_dtype="float32"); u0 = R.matmul(f2, Wu, out_dtype="float32")\n'
        + GROUPED.format("p0", "u0")
        + 'q = R.astype(p, "float32"); e = R.sigmoid(q); a = R.multiply(q, e)\n'
        "y = R.multiply(a, u)",
        "x g Wg Wu",
        replace(gated(rows=BS, dtype="float16"), out_dtype="float32"),
        dtype="float16",
    ),
    read_by_another("norm", "k = R.reshape(h, R.shape([b * s, 32])); z = R.matmul(k, Wo)"),
    read_by_another("reshape", "z = R.matmul(f, Wo)"),
    Rewrite(
        Chain(
            "input_of_other_features",
            "x[6,32] g[32] Wg[64,48] Wu[64,48]",
            H + "f = R.reshape(h, R.shape([3, 64])); p = R.matmul(f, Wg); u = R.matmul(f, Wu)\n"
            "a = R.nn.silu(p); y = R.multiply(a, u)",
            "y",
        ),
        replace(gated(rows=3, norm=None), k=64),
        "h Wg Wu",
        ("nn.rms_norm",),
    ),
]


@pytest.mark.parametrize("case", REWRITES, ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check(PASS)


def test_one_kernel_between_the_reshapes_of_its_input_and_its_result() -> None:
    chain = next(r.chain for r in REWRITES if r.chain.name == "exported_silu")
    func, decision = fused(chain, PASS)
    assert calls(func) == ["reshape", "call_tir", "reshape"]
    assert decision.spelling == "rms_norm separate silu"


CHAINS = [r.chain for r in REWRITES]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)
