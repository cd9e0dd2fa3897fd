"""Products of integers, and of float32 as tf32: cases, and what they must come to.

Products of integers are exact.  tf32 keeps 10 bits of mantissa, and the products of two such
numbers are exact in float32; so a kernel that rounds both operands, and else computes in float32,
is judged as one of float32 that is given rounded operands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relax_fusion.workload import GatedFFN, NormMatmul, Projection, Rope
from relax_fusion.workload.reference import evaluate

from .contraction_cases import GATED, ROWS, Arrays, Case, plain, turned

INTEGERS = NormMatmul(41, 208, (plain(80),), None, "int8", "int32")
TF32 = NormMatmul(41, 72, (plain(80),), None, "float32", "float32", allow_tf32=True)
TF32_GATED = replace(GATED, rows=30, k=72, n=48, norm=None, allow_tf32=True)

TF32_ROUNDING = 2.0**-11
"""Most that rounding to tf32 changes a number by, as a part of it: half of its last bit."""


def tf32(values: np.ndarray) -> np.ndarray:
    """Round to tf32, ties away from zero."""
    mantissa, exponent = np.frexp(values)
    whole = np.trunc(mantissa * 2048 + np.copysign(0.5, mantissa))  # 11 bits, one of them implied
    return np.ldexp(whole, exponent - 11).astype(values.dtype)


def multiplied(arrays: Arrays) -> Arrays:
    """Return the inputs of a case with those rounded to tf32 that tensor cores multiply."""
    return {n: tf32(a) if n == "x" or n.startswith("w") else a for n, a in arrays.items()}


@dataclass(frozen=True)
class IntegerCase(Case):
    """A product of integers of the whole range of their type."""

    def inputs(self) -> Arrays:
        """Return x and the weight, and float32 operands of the steps."""
        work, rng = self.work, np.random.default_rng(3)
        assert isinstance(work, NormMatmul)
        (p,) = work.outputs
        info = np.iinfo(work.dtype)
        shapes = {"x": (self.rows, work.k), "w0": (p.n, work.k)[:: 1 if p.layout == "nk" else -1]}
        factors = {
            name: rng.integers(info.min, info.max, shape, work.dtype, endpoint=True)
            for name, shape in shapes.items()
        }
        behind = [o for o in work.graph.inputs if o.name not in factors]
        return {**factors, **{o.name: rng.random(p.n, o.dtype) for o in behind}}

    def check(self, arrays: Arrays, results: list[np.ndarray], stored: bool = False) -> None:
        """Assert that sums are exact; two products and a sum behind are rounded, and the result."""
        exact = evaluate(self.work.graph, arrays)["out0"]
        if self.work.out_dtype == "int32":
            np.testing.assert_array_equal(results[0], exact)
            return
        unbiased = {n: 0 * a if n.startswith("bias") else a for n, a in arrays.items()}
        products = np.abs(evaluate(self.work.graph, unbiased)["out0"])
        single, stored = np.finfo("float32").eps, np.finfo(self.work.out_dtype).eps / 2
        bound = single * products + (single + stored) * np.abs(exact)
        assert (np.abs(results[0].astype("float64") - exact) <= bound).all()


def integer_cases() -> list[IntegerCase]:
    """Return products of int8 and of uint8: edges that no tile has, copies of 16, 8 and 4 bytes."""

    def scaled(name: str, **others: Any) -> IntegerCase:
        outputs = (plain(80, "scale", 2.0**-8, "bias"),)
        return IntegerCase(name, replace(INTEGERS, outputs=outputs, **others), others["rows"])

    def case(name: str, k: int, n: int, layout: str = "nk", rows=41, **other: str) -> IntegerCase:
        outputs = (Projection(n, layout),)
        return IntegerCase(name, replace(INTEGERS, rows=rows, k=k, outputs=outputs, **other), 41)

    return [
        case("nk", 208, 64),
        case("k_200", 200, 41),
        case("k_196", 196, 80, rows=ROWS),
        case("kn", 196, 80, "kn"),
        case("kn_44", 132, 44, "kn"),
        case("one", 256, 64, rows=1),
        case("uint8", 208, 48, dtype="uint8"),
        case("uint8_kn", 128, 96, "kn", dtype="uint8"),
        scaled("scaled", rows=41, out_dtype="float32"),
        scaled("scaled_one", rows=1, out_dtype="float32"),
        scaled("scaled_uint8", dtype="uint8", out_dtype="float16", rows=41),
    ]


def tf32_cases() -> list[Case]:
    """Return products of float32 as tf32: copies of one, two and four elements."""
    found: dict[str, NormMatmul | GatedFFN] = {
        "nk": TF32,
        "k_71": replace(TF32, k=71, outputs=(plain(41, "bias"),)),
        "kn": replace(TF32, k=70, outputs=(plain(96, "bias", "residual", layout="kn"),)),
        "kn_41": replace(TF32, outputs=(plain(41, layout="kn"),)),
        "half_out": replace(TF32, out_dtype="float16", outputs=(plain(80, "gelu"),)),
        "gated": TF32_GATED,
        "gated_kn": replace(TF32_GATED, layout="kn", merged=False, bias=True),
        "rope": replace(TF32, outputs=(turned(Rope(16, 48, "float32"), 64),)),
    }
    return [Case(f"tf32_{name}", work, 41) for name, work in found.items()]
