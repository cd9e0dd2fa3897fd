"""FuseAttentionChain: a mask is read by position only where its dtypes compute what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from ..support.attention_chains import PASS, attention, const
from ..support.chains import Chain, module, run_pass
from ..support.slow import quick_if

CAUSAL, WHOLE = "top_left", "none"


@dataclass(frozen=True)
class Case:
    """Bindings of the mask c of `q_len` by `kv_len`, and what the workload says of it.

    `causal` is None where the mask stays one of data.
    """

    name: str
    steps: str
    causal: str | None = None
    q_len: int | str = 6
    kv_len: int | str = 6
    bounds: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Name the test."""
        return self.name


def positions(dtype: str, q_len: object = 6, kv_len: object = 6, start: int = 0) -> str:
    """Return bindings of i and j, positions that `dtype` has."""
    return "".join(
        f'{x}0 = R.arange({start}, {n} + {start}, 1, "int64"); {x}1 = R.astype({x}0, "{dtype}")\n'
        f"{x} = R.expand_dims({x}1, axis=[{axis}])\n"
        for x, n, axis in (("i", q_len, 1), ("j", kv_len, 0))
    )


def compared(name: str, dtype: str, causal: str | None = None, size: int = 6, start: int = 0):
    """Compare positions in `dtype`."""
    steps = positions(dtype, size, size, start) + "c = R.less_equal(j, i)"
    return Case(name, steps, causal, size, size)


def dynamic(name: str, dtype: str, sizes: str, causal: str | None = None, **bounds: int):
    """Compare positions of symbolic sizes in `dtype`."""
    q_len, kv_len = sizes
    steps = positions(dtype, q_len, kv_len) + "c = R.less_equal(j, i)"
    return Case(name, steps, causal, q_len, kv_len, bounds)


LONGEST = (1 << 31) - 1
WIDE = positions("int64")
LATER = WIDE + "a0 = R.greater(j, i)\n"
EARLIER = WIDE + "a = R.less_equal(j, i)\n"
CASES = [
    compared("int8", "int8", CAUSAL),
    compared("int8 wraps around", "int8", size=129),
    compared("int8 at its end", "int8", CAUSAL, size=128),
    compared("uint8 wraps around", "uint8", start=251),
    compared("uint8 from the other end", "uint8", start=-1),
    compared("int16 wraps around", "int16", start=32763),
    compared("int32 wraps around", "int32", start=(1 << 31) - 5),
    compared("float16", "float16", CAUSAL, size=2049),
    compared("float16 is rounded", "float16", size=2050),
    compared("bfloat16", "bfloat16", CAUSAL, size=257),
    compared("bfloat16 is rounded", "bfloat16", size=258),
    compared("float32 is rounded", "float32", start=(1 << 24) - 3),
    compared("float64", "float64", CAUSAL, start=(1 << 24) - 3),
    dynamic("dynamic int64", "int64", "sn", CAUSAL),
    dynamic("dynamic int32", "int32", "sn"),
    dynamic("dynamic int32 with a bound", "int32", "sn", CAUSAL, s=LONGEST, n=LONGEST),
    dynamic("dynamic int32, as many queries as keys", "int32", "nn", CAUSAL),
    dynamic("dynamic float32", "float32", "sn"),
    dynamic("dynamic float32, as many queries as keys", "float32", "nn", CAUSAL),
    dynamic("dynamic float16, as many queries as keys", "float16", "nn"),
    dynamic("dynamic float16 with a bound", "float16", "sn", CAUSAL, s=2048, n=2048),
    dynamic("dynamic float16 with a large bound", "float16", "sn", s=2048, n=2050),
    Case(
        "difference of uint8",
        positions("uint8") + f"d = R.subtract(i, j); c = R.greater_equal(d, {const(0, 'uint8')})",
    ),
    Case(
        "difference of int8",
        positions("int8") + f"d = R.subtract(i, j); c = R.greater_equal(d, {const(0, 'int8')})",
        CAUSAL,
    ),
    Case(
        "sum beyond int8",
        positions("int8")
        + f"d = R.add(j, {const(125, 'int8')}); e = R.add(i, {const(125, 'int8')})\n"
        + "c = R.less_equal(d, e)",
    ),
    Case(
        "product beyond int32",
        positions("int32")
        + f"d = R.multiply(j, {const(1 << 29, 'int32')}); c = R.less_equal(d, i)",
    ),
    Case(
        "product beyond int64",
        WIDE + f"d = R.multiply(j, {const(1 << 61, 'int64')}); c = R.less_equal(d, i)",
    ),
    Case(
        "bits of integers negated",
        LATER + 'a1 = R.astype(a0, "int32"); a2 = R.bitwise_not(a1); c = R.astype(a2, "bool")',
    ),
    Case("bits of booleans negated", LATER + "c = R.bitwise_not(a0)", CAUSAL),
    Case(
        "bits of integers",
        EARLIER + f'a1 = R.astype(a, "int32"); a2 = R.bitwise_and(a1, {const(2, "int32")})\n'
        'c = R.astype(a2, "bool")',
    ),
    Case(
        "constant that wraps around",
        EARLIER + f'f0 = R.full(R.shape([6, 6]), {const(256, "int32")}, "int32")\n'
        f'f1 = R.astype(f0, "int8"); f = R.not_equal(f1, {const(0, "int8")})\n'
        "c = R.logical_or(f, a)",
    ),
    Case(
        "constant that is rounded to minus infinity",
        EARLIER + f'f0 = R.where(a, {const(0.0)}, {const(-1e9)}); f1 = R.astype(f0, "float16")\n'
        f"c = R.greater(f1, {const(float('-inf'), 'float16')})",
        CAUSAL,
    ),
    Case(
        "fraction as a boolean",
        EARLIER + 'f = R.full(R.shape([6, 6]), R.const(0.5, "float32"), "bool")\n'
        "c = R.logical_or(f, a)",
    ),
    Case(
        "constant that is not a number",
        EARLIER + f"f = R.where(a, {const(0.0)}, R.const(1e999 - 1e999, 'float32'))\n"
        f"c = R.equal(f, {const(0.0)})",
    ),
    Case("operands of two dtypes", WIDE + 'e = R.astype(i, "float16"); c = R.less_equal(j, e)'),
    Case(
        "positions from a half",
        'i0 = R.arange(0.5, 6.5, 1, "int32"); j0 = R.arange(0, 6, 1, "int32")\n'
        "i = R.expand_dims(i0, axis=[1]); j = R.expand_dims(j0, axis=[0]); c = R.less_equal(j, i)",
    ),
    Case(
        "sum of ones in bfloat16",
        'l = R.ones((300, 300), "bfloat16"); i = R.cumsum(l, axis=0); j = R.cumsum(l, axis=1)\n'
        "c = R.less_equal(j, i)",
        q_len=300,
        kv_len=300,
    ),
    Case(
        "turned by negative axes",
        WIDE + "a = R.less_equal(i, R.permute_dims(i, axes=[-1, -2]))\n"
        "c = R.permute_dims(a, axes=[-1, 0])",
        CAUSAL,
    ),
    Case(
        "integers that float64 does not tell apart",
        WIDE + f"d = R.add(i, {const(1 << 53, 'int64')}); e = R.add(j, {const(1 << 53, 'int64')})\n"
        "c = R.less_equal(e, d)",
        CAUSAL,
    ),
    Case(
        "doubled again and again",
        WIDE
        + "x0 = R.add(j, j)\n"
        + "\n".join(f"x{n + 1} = R.add(x{n}, x{n})" for n in range(60))
        + "\nc = R.less_equal(x60, i)",
    ),
    Case(
        "choices between choices",
        WIDE
        + "b0 = R.less_equal(j, i)\n"
        + "\n".join(
            f"p{n} = R.equal(j, {const(n % 6, 'int64')})\n"
            f"q{n} = R.equal(i, {const(n % 5, 'int64')}); b{n + 1} = R.where(b{n}, p{n}, q{n})"
            for n in range(30)
        )
        + "\nc = R.logical_not(b30)",
    ),
]


@pytest.mark.parametrize("case", quick_if(lambda c: "float16" not in str(c)[:7], CASES), ids=str)
def test_reads(case: Case) -> None:
    q, kv = (f"[1,1,{n},8]" for n in (case.q_len, case.kv_len))
    low = const(float("-inf"))
    body = attention(f"{case.steps}\ns = R.where(c, s0, {low})")
    mod = module([Chain("masked", f"q{q} k{kv} v{kv}", body, "o")])
    work = run_pass(mod, PASS, bounds=case.bounds)[1][0].workload
    dims = (False, False, True, True)
    assert (work.causal, work.window) == (case.causal or "none", None)
    assert work.mask_dims == (dims if case.causal is None else None)


def test_a_bias_doubled_again_and_again() -> None:
    steps = "y0 = R.negative(y)\n" + "\n".join(f"y{n + 1} = R.add(y{n}, y{n})" for n in range(40))
    body = attention(steps + "\ns = R.add(s0, y40)")
    mod = module([Chain("biased", "q[1,1,6,8] k[1,1,6,8] v[1,1,6,8] y[6,6]", body, "o")])
    assert run_pass(mod, PASS)[1][0].workload.bias_dims == (False, False, True, True)
