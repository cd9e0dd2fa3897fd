"""FuseGatedFFN: gates and plain MLPs in every spelling, numbers."""

from __future__ import annotations

import itertools

import pytest

from relax_fusion import DynamicDim, Norm, NormMatmul, Projection

from ..support.chains import Chain, Rewrite, assert_numbers, assert_untouched, fused, module
from ..support.gated_chains import ACTIVATION_SPELLINGS, PASS, RMS, SEPARATE, TWO, H, N, gated


def merged_case(gate_first: bool, swapped: bool, bias: bool, norm: bool) -> Rewrite:
    words = [w for w, on in (("swapped", swapped), ("bias", bias), ("norm", norm)) if on]
    name = "_".join(["merged", "gate_first" if gate_first else "gate_second", *words])
    gate, up = ("p[0]", "p[1]") if gate_first else ("p[1]", "p[0]")
    body = (H if norm else "") + f"t = R.permute_dims(W); m = R.matmul({'h' if norm else 'x'}, t)\n"
    body += (
        f"{'n = R.add(m, c); ' if bias else ''}p = R.split({'n' if bias else 'm'}, 2, axis=-1)\n"
    )
    body += f"a = {gate}; b = {up}; s = R.nn.silu(a)\n"
    body += "y = R.multiply(b, s)" if swapped else "y = R.multiply(s, b)"
    inputs = "x[6,32] g[32] W[96,32]" if norm else "x[6,32] W[96,32]"
    chain = Chain(name, inputs + (" c[96]" if bias else ""), body, "y")
    work = gated(
        merged=True, gate_first=gate_first, layout="nk", bias=bias, norm=RMS if norm else None
    )
    return Rewrite(chain, work, "x" + " g" * norm + " W" + " c" * bias)


REWRITES = [
    *(
        Rewrite(
            Chain(f"separate_{name}", SEPARATE, TWO + text + "; y = R.multiply(a, u)", "y"),
            gated(activation),
            "x g Wg Wu",
        )
        for name, (activation, text) in ACTIVATION_SPELLINGS.items()
    ),
    *(merged_case(*flags) for flags in itertools.product([True, False], repeat=4)),
    Rewrite(
        Chain(
            "separate_biases_symbolic_float16",
            "x[b,s,32] r[b,s,32] g[32] Wg[48,32] Wu[48,32] c[48] d[48]",
            "s0 = R.add(x, r); h = R.nn.rms_norm(s0, g, axes=[-1], epsilon=1e-5)\n"
            "tg = R.permute_dims(Wg); tu = R.permute_dims(Wu)\n"
            "p0 = R.matmul(h, tg); p = R.add(p0, c); u0 = R.matmul(h, tu); u = R.add(d, u0)\n"
            "a = R.nn.gelu_tanh(p); y = R.multiply(u, a)",
            "(y, s0)",
            {"b": 2, "s": 5},
            "float16",
        ),
        gated(
            "gelu_tanh",
            rows=DynamicDim("b * s"),
            layout="nk",
            bias=True,
            dtype="float16",
            norm=Norm("rms", 1e-5, residual=True, returns_sum=True),
        ),
        "x r g Wg Wu c d",
    ),
    Rewrite(
        Chain(
            "split_by_index",
            "x[6,32] W[32,96]",
            "m = R.matmul(x, W); p = R.split(m, [48], axis=1); a = p[0]; b = p[1]\n"
            "s = R.nn.relu(a); y = R.multiply(s, b)",
            "y",
        ),
        gated("relu", merged=True, norm=None),
        "x W",
    ),
    Rewrite(
        Chain(
            "gate_is_also_the_up_projection",
            "x[6,32] W[32,48]",
            "p = R.matmul(x, W); a = R.nn.gelu(p); y = R.multiply(a, p)",
            "y",
        ),
        gated("gelu", norm=None),
        "x W W",
    ),
    Rewrite(
        Chain(
            "plain_mlp",
            "x[2,3,32] g[32] c[32] W[32,48] b[48]",
            "h = R.nn.layer_norm(x, g, c, axes=[-1], epsilon=1e-5); m = R.matmul(h, W)\n"
            "n = R.add(m, b); y = R.nn.gelu_tanh(n)",
            "y",
        ),
        NormMatmul(
            6,
            32,
            (Projection(N, "kn", ("bias", "gelu_tanh")),),
            Norm("layer", 1e-5, beta=True),
            *["float32"] * 2,
        ),
        "x g c W b",
    ),
    Rewrite(
        Chain(
            "plain_mlp_whose_residual_is_the_norm",
            "x[6,32] g[32] W[32,32]",
            H + "m = R.matmul(h, W); a = R.nn.gelu(m); y = R.add(a, h)",
            "y",
        ),
        NormMatmul(
            6,
            32,
            (Projection(32, "kn", ("gelu",)),),
            Norm("rms", 1e-5, returns_norm=True),
            *["float32"] * 2,
        ),
        "x g W",
        ("add",),
    ),
    Rewrite(
        Chain(
            "norm_read_by_another_projection",
            SEPARATE + " Wo[32,16]",
            TWO + "a = R.nn.silu(p); y = R.multiply(a, u); z = R.matmul(h, Wo)",
            "(y, z)",
        ),
        gated(norm=None),
        "h Wg Wu",
        ("matmul", "nn.rms_norm"),
    ),
]


@pytest.mark.parametrize("case", REWRITES, ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check(PASS)


def test_constants_that_are_only_close_are_no_gelu() -> None:
    for wrong, right in (("0.5005", "0.5"), ("0.7069", "0.70710678"), ("1.001", "1.0")):
        text = ACTIVATION_SPELLINGS["gelu_by_erf"][1].replace(f"({right},", f"({wrong},")
        assert wrong in text
        chain = Chain("main", "x[6,32] W[32,48]", "p = R.matmul(x, W)\n" + text, "a")
        assert_untouched(module([chain]), PASS)


def test_float16_constants_are_read_as_rounded() -> None:
    name, text = ACTIVATION_SPELLINGS["gelu_by_tanh"]
    body = "p = R.matmul(x, W)\n" + text.replace("float32", "float16")
    _, decision = fused(Chain("main", "x[6,32] W[32,48]", body, "a", dtype="float16"), PASS)
    assert decision.workload.outputs[0].epilogue == (name,)


CHAINS = [r.chain for r in REWRITES]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)
