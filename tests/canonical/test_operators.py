"""RecogniseOperators: every spelling of a norm and of an activation, and what is none."""

from __future__ import annotations

import itertools

import pytest
import tvm

from relax_fusion.canonical import RecogniseOperators

from .common import assert_same_numbers, module, operators

X = "x: R.Tensor(('b', 's', 8), 'float32')"
G = "g: R.Tensor((8,), 'float32')"
B = "c: R.Tensor((8,), 'float32')"

SQUARES = ("R.multiply(v, v)", "R.power(v, R.const(2.0, 'float32'))", "R.square(v)")
ROOTS = (
    "h = R.multiply(v, R.rsqrt(e))",
    "h = R.multiply(R.divide(R.const(1.0, 'float32'), R.sqrt(e)), v)",
    "h = R.multiply(R.power(e, R.const(-0.5, 'float32')), v)",
    "h = R.divide(v, R.sqrt(e))",
)
GAMMAS = (
    ("y = R.multiply(h, R.const(1.0, 'float32'))", 1),
    ("y = R.multiply(g, h)", 0),
    ("y = R.multiply(h, R.add(R.const(1.0, 'float32'), g))", 1),
    ("k = R.expand_dims(g, axis=[0, 1])\ny = R.multiply(h, k)", 2),
)


def rms(square: str, root: str, gamma: str) -> str:
    """Return a norm of `v` in a spelling."""
    lines = (
        f"q = {square}",
        "m = R.mean(q, axis=[-1], keepdims=True)",
        "e = R.add(m, R.const(1e-5, 'float32'))",
        root,
        gamma,
    )
    return "\n".join(lines).replace("'", '"')


@pytest.mark.parametrize("gamma,others", GAMMAS)
@pytest.mark.parametrize("root", ROOTS)
def test_rms_norm(root: str, gamma: str, others: int) -> None:
    for square in SQUARES:
        before = module(f"{X}, {G}", "v = R.negative(x)\n" + rms(square, root, gamma))
        after = RecogniseOperators()(before)
        found = operators(after)
        assert found.count("nn.rms_norm") == 1 and len(found) == 2 + others
        assert_same_numbers(before, after)


@pytest.mark.parametrize("root", ROOTS)
def test_layer_norm(root: str) -> None:
    for square, beta in itertools.product(SQUARES[:2], ("R.add(k, c)", "R.add(c, k)", "R.abs(k)")):
        body = (
            "u = R.mean(x, axis=[2], keepdims=True)\nv = R.subtract(x, u)\n"
            + rms(square, root, "k = R.multiply(h, g)")
            + f"\ny = {beta}"
        )
        before = module(f"{X}, {G}, {B}", body)
        after = RecogniseOperators()(before)
        assert operators(after) == ["nn.layer_norm", *(["abs"] if "abs" in beta else [])]
        assert_same_numbers(before, after)


HALF = "x: R.Tensor(('b', 's', 8), 'float16'), g: R.Tensor((8,), 'float16')"


@pytest.mark.parametrize(
    "gamma,expected",
    [
        ("n = R.astype(h, 'float16')\ny = R.multiply(g, n)", ["nn.rms_norm"]),
        (
            "k = R.astype(g, 'float32')\nn = R.multiply(h, k)\ny = R.astype(n, 'float16')",
            ["nn.rms_norm"],
        ),
        (
            "k = R.astype(g, 'float32')\nl = R.add(k, R.const(1.0, 'float32'))\n"
            "n = R.multiply(h, l)\ny = R.astype(n, 'float16')",
            ["astype", "astype", "add", "nn.rms_norm", "astype"],
        ),
    ],
    ids=["gamma behind the cast", "gamma in front of it", "1 + gamma"],
)
@pytest.mark.parametrize("twice", [False, True])
def test_half_precision(gamma: str, expected: list[str], twice: bool) -> None:
    wide = "w = R.astype(x, 'float32')\nv = R.astype(x, 'float32')\n"
    square = "R.multiply(w, w)" if twice else "R.multiply(v, v)"
    before = module(HALF, (wide + rms(square, ROOTS[0], gamma)).replace("'", '"'))
    after = RecogniseOperators()(before)
    assert sorted(operators(after)) == sorted(expected)
    assert_same_numbers(before, after)


ACTIVATIONS = {
    "nn.silu": "a = R.sigmoid(x)\ny = R.multiply(a, x)",
    "nn.relu": "y = R.maximum(R.const(0.0, 'float32'), x)",
    "nn.gelu": "d = R.divide(x, R.const(1.4142135381698608, 'float32'))\nf = R.erf(d)\n"
    "p = R.add(f, R.const(1.0, 'float32'))\nh = R.multiply(x, R.const(0.5, 'float32'))\n"
    "y = R.multiply(h, p)",
    "nn.gelu_tanh": "q = R.power(x, R.const(3.0, 'float32'))\n"
    "k = R.multiply(q, R.const(0.044715, 'float32'))\nd = R.add(x, k)\n"
    "f = R.multiply(d, R.const(0.7978845608028654, 'float32'))\nt = R.tanh(f)\n"
    "p = R.add(t, R.const(1.0, 'float32'))\nh = R.multiply(x, R.const(0.5, 'float32'))\n"
    "y = R.multiply(h, p)",
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    before = module(X, ACTIVATIONS[name].replace("'", '"'))
    after = RecogniseOperators()(before)
    assert operators(after) == [name]
    assert_same_numbers(before, after, rtol=1e-6)  # constants are of float32


TERMS = {
    "a product": "q = R.multiply(x, R.multiply(x, x))\nk = R.multiply(q, {k})\nd = R.add(x, k)",
    "a square": "q = R.multiply(R.square(x), x)\nk = R.multiply({k}, q)\nd = R.add(k, x)",
    "scaled first": "q = R.multiply({k}, x)\nk = R.multiply(R.multiply(q, x), x)\nd = R.add(x, k)",
    "factored": "q = R.multiply(R.multiply({k}, x), x)\ng = R.add(R.const(1.0, 'float32'), q)\n"
    "d = R.multiply(x, g)",
    "factored, by a power": "q = R.power(x, R.const(2.0, 'float32'))\nk = R.multiply(q, {k})\n"
    "g = R.add(k, R.const(1.0, 'float32'))\nd = R.multiply(g, x)",
}


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("number,expected", [(0.044715, ["nn.gelu_tanh"]), (0.0457, None)])
def test_terms_of_the_tanh_form(term: str, number: float, expected: list[str] | None) -> None:
    body = (
        TERMS[term].format(k=f"R.const({number}, 'float32')")
        + "\nf = R.multiply(d, R.const(0.7978845608028654, 'float32'))\nt = R.tanh(f)\n"
        "p = R.add(t, R.const(1.0, 'float32'))\nh = R.multiply(x, R.const(0.5, 'float32'))\n"
        "y = R.multiply(h, p)"
    )
    before = module(X, body.replace("'", '"'))
    after = RecogniseOperators()(before)
    assert after.same_as(before) if expected is None else operators(after) == expected
    assert_same_numbers(before, after, rtol=1e-6)


OTHERS = {
    "a mean over rows": rms(SQUARES[0], ROOTS[0], "y = R.abs(h)").replace("axis=[-1]", "axis=[1]"),
    "the square of something else": rms("R.multiply(v, x)", ROOTS[0], "y = R.abs(h)"),
    "the root of something else": rms(SQUARES[0], ROOTS[0], "y = R.abs(h)").replace(
        "R.multiply(v, R.rsqrt", "R.multiply(x, R.rsqrt"
    ),
    "a sum": rms(SQUARES[0], ROOTS[0], "y = R.abs(h)").replace("R.mean", "R.sum"),
    "another polynomial": "c = R.multiply(x, x)\nd = R.multiply(c, R.const(0.05, 'float32'))\n"
    "e = R.add(d, R.const(1.0, 'float32'))\nf = R.multiply(e, x)\n"
    "t = R.tanh(R.multiply(f, R.const(0.79788456, 'float32')))\n"
    "p = R.add(t, R.const(1.0, 'float32'))\nh = R.multiply(x, R.const(0.5, 'float32'))\n"
    "y = R.multiply(h, p)",
    "another activation": "a = R.sigmoid(R.negative(x))\nz = R.multiply(a, x)\ny = R.add(z, v)",
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_none_stays(case: str) -> None:
    before = module(X, "v = R.negative(x)\n" + OTHERS[case])
    assert RecogniseOperators()(before).same_as(before)


def test_gamma_by_rows_is_no_gamma() -> None:
    params = f"{X}, g: R.Tensor(('s', 8), 'float32')"
    before = module(params, "v = R.negative(x)\n" + rms(SQUARES[0], ROOTS[0], GAMMAS[1][0]))
    after = RecogniseOperators()(before)
    assert operators(after) == ["negative", "nn.rms_norm", "multiply"]
    assert_same_numbers(before, after)


def test_beta_in_front_of_gamma_is_multiplied() -> None:
    body = "u = R.mean(x, axis=[2], keepdims=True)\nv = R.subtract(x, u)\n"
    body += rms(SQUARES[0], ROOTS[0], "k = R.add(h, c)\ny = R.multiply(k, g)")
    before = module(f"{X}, {G}, {B}", body)
    after = RecogniseOperators()(before)
    assert operators(after) == ["nn.layer_norm", "multiply"]
    assert_same_numbers(before, after)


def test_a_vector_has_no_rows() -> None:
    params = "x: R.Tensor((8,), 'float32')"
    before = module(params, "v = R.negative(x)\n" + rms(SQUARES[0], ROOTS[0], "y = R.abs(h)"), "")
    assert RecogniseOperators()(before).same_as(before)


def test_float64_has_no_norm() -> None:
    body = "v = R.negative(x)\n" + rms(SQUARES[0], ROOTS[0], "y = R.abs(h)")
    params, body = (text.replace("float32", "float64") for text in (X, body))
    before = module(params, body)
    assert RecogniseOperators()(before).same_as(before)


def test_casts_to_the_same_dtype_go() -> None:
    before = module(X, "v = R.astype(x, 'float32')\nw = R.negative(v)\ny = R.astype(w, 'float32')")
    after = RecogniseOperators()(before)
    assert operators(after) == ["negative", "reshape"]  # a result is no other name of a tensor
    assert_same_numbers(before, after)


def test_what_is_overwritten_is_not_read_later() -> None:
    mod = tvm.script.from_source("""
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((2, 8), "float32"), g: R.Tensor((8,), "float32")):
        with R.dataflow():
            v = R.negative(x)
            m = R.mean(R.multiply(v, v), axis=[-1], keepdims=True)
            h = R.multiply(v, R.rsqrt(R.add(m, R.const(1e-5, "float32"))))
            z = R.call_inplace_packed("zero", v, inplace_indices=[0],
                                      ty_args=[R.Tensor((2, 8), "float32")])
            y = R.multiply(h, g)
            R.output(y, z)
        return (y, z)
""")
    assert RecogniseOperators()(mod).same_as(mod)
