"""Casts to and from bfloat16 and 8-bit floats on a CPU, compared with those of ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx

from relax_fusion import make_target
from relax_fusion.mend.narrow_floats import RoundNarrowFloats

from ..support.chains import Chain, compiled, module, outputs

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
NARROW = (*FLOAT8, "bfloat16")


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name))


def difficult(name: str) -> np.ndarray:
    """Return all numbers of a type of 8 bits, what lies between them, and what is beyond."""
    codes = np.arange(256, dtype="uint8").view(dtype_of(name)).astype("float32")
    finite = np.unique(codes[np.isfinite(codes)])
    between = (finite[1:] + finite[:-1]) / 2
    near = [np.nextafter(between, np.float32(side)) for side in (-np.inf, np.inf)]
    beyond = np.array([0.0, -0.0, 1e-9, 460, 464, 465, 61439, 61440, 1e30, np.inf, np.nan], "f4")
    return np.concatenate([finite, between, *near, beyond, -beyond])


NUMBERS = {"bfloat16": np.random.default_rng(1).standard_normal(999).astype("float32")} | {
    name: difficult(name) for name in FLOAT8
}
CHAINS = [
    *(
        chain
        for name in FLOAT8
        for chain in (
            Chain(f"read_{name}", f"x[256]:{name}", "y = R.astype(x, 'float32')", "y"),
            Chain(f"write_{name}", "x[n]", f"y = R.astype(x, '{name}')", "y"),
            Chain(f"square_{name}", f"x[256]:{name}", "a = R.add(x, x); y = R.multiply(a, x)", "y"),
        )
    ),
    *(
        Chain(
            f"rounded_{name}",
            "x[n]",
            f"q = R.astype(x, '{name}'); w = R.astype(q, 'float32'); y = R.add(w, w)",
            "y",
        )
        for name in NARROW
    ),
    Chain("stored_nan", "x[6]", "y = R.astype(x, 'bfloat16')", "y"),
    Chain("read_nan", "x[6]", "q = R.astype(x, 'bfloat16'); y = R.add(q, q)", "y"),
    Chain(
        "vectors",
        "x[4,64] g[64]",
        "h = R.nn.rms_norm(x, g, axes=[-1], epsilon=0.0); y = R.astype(h, 'float8_e4m3fn')",
        "y",
    ),
    Chain(
        "both",
        "x[256]:float8_e4m3fn",
        "a = R.tanh(R.astype(x, 'bfloat16')); y = R.astype(a, 'float8_e5m2')",
        "y",
    ),
    Chain(
        "constant",
        "x[1]",
        "c = R.astype(R.const(0.001953125, 'float8_e4m3fn'), 'float32')\ny = R.add(x, c)",
        "y",
    ),
]


@pytest.fixture(scope="module")
def machine() -> relax.VirtualMachine:
    return compiled(module(CHAINS))


def run(machine: relax.VirtualMachine, name: str, *arrays: np.ndarray) -> np.ndarray:
    return outputs(machine, name, list(arrays))[0]


@pytest.mark.parametrize("name", FLOAT8)
def test_every_code_is_read(machine: relax.VirtualMachine, name: str) -> None:
    codes = np.arange(256, dtype="uint8").view(dtype_of(name))
    np.testing.assert_array_equal(run(machine, f"read_{name}", codes), codes.astype("float32"))


@pytest.mark.parametrize("name", FLOAT8)
def test_every_number_is_written(machine: relax.VirtualMachine, name: str) -> None:
    x = NUMBERS[name]
    got = run(machine, f"write_{name}", x).astype("float32")
    np.testing.assert_array_equal(got, x.astype(dtype_of(name)).astype("float32"))


@pytest.mark.parametrize("name", NARROW)
def test_casts_there_and_back_are_kept(machine: relax.VirtualMachine, name: str) -> None:
    x = NUMBERS[name]
    rounded = x.astype(dtype_of(name)).astype("float32")
    np.testing.assert_array_equal(run(machine, f"rounded_{name}", x), rounded + rounded)


@pytest.mark.parametrize("name", FLOAT8)
def test_arithmetic_rounds_each_step(machine: relax.VirtualMachine, name: str) -> None:
    codes = np.arange(256, dtype="uint8").view(dtype_of(name))
    got = run(machine, f"square_{name}", codes).astype("float32")
    np.testing.assert_array_equal(got, ((codes + codes) * codes).astype("float32"))


@pytest.mark.parametrize("name", ["stored_nan", "read_nan"])
def test_nan_of_any_bits_stays_nan(machine: relax.VirtualMachine, name: str) -> None:
    bits = [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FFF8000, 0x7FC00000]
    assert np.isnan(run(machine, name, np.array(bits, "uint32").view("float32"))).all()


def test_stores_of_8_bits_in_vectors(machine: relax.VirtualMachine) -> None:
    x, g = np.full((4, 64), -2, "float32"), NUMBERS["float8_e4m3fn"][:64]
    expected = (-g).astype(ml_dtypes.float8_e4m3fn).astype("float32")
    got = run(machine, "vectors", x, g).astype("float32")
    np.testing.assert_array_equal(got, np.broadcast_to(expected, (4, 64)))


def test_8_bits_among_bfloat16(machine: relax.VirtualMachine) -> None:
    codes = np.arange(256, dtype="uint8").view(ml_dtypes.float8_e4m3fn)
    rounded = np.tanh(codes.astype("float32")).astype(ml_dtypes.bfloat16)  # as the graph does
    expected = rounded.astype(ml_dtypes.float8_e5m2)
    got = run(machine, "both", codes).astype("float32")
    np.testing.assert_array_equal(got, expected.astype("float32"))


def test_constants(machine: relax.VirtualMachine) -> None:
    assert run(machine, "constant", np.zeros(1, "float32")) == [2**-9]


def test_gpus_that_have_8_bit_floats_cast_them_themselves() -> None:
    mod = relax.transform.LegalizeOps()(module(CHAINS))
    tvm.ir.assert_structural_equal(RoundNarrowFloats(make_target("h200"))(mod), mod)


def test_no_8_bit_float_is_cast_on_other_gpus() -> None:
    mod = relax.transform.LegalizeOps()(module(CHAINS))
    out = RoundNarrowFloats(make_target("a100"))(mod)
    for gvar, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            assert "float8" not in str(casts(out[gvar]))
            assert ("bfloat16" in str(casts(func))) == ("bfloat16" in str(casts(out[gvar])))


def casts(func: tirx.PrimFunc) -> list[str]:
    found: list[str] = []
    tvm_ffi.structural_walk(
        func.body, (tirx.Cast, lambda c: found.append(f"{c.value.ty.dtype} to {c.ty.dtype}"))
    )
    return found
