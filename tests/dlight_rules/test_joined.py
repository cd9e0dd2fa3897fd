"""Heads of queries and keys, normalised and rotated by one function, and by one kernel."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import ir

from relax_fusion import host_target, make_target
from relax_fusion.canonical import FuseNormRotation
from relax_fusion.dlight_rules import JoinedRule
from relax_fusion.dlight_rules.apply import lost_reductions
from relax_fusion.mlc.repairs import RunThreadsInTurn
from relax_fusion.transforms.join_rotations import JoinRotations

from ..canonical.common import module, operators
from ..support.generic_cases import array, compiled, shape_of
from ..support.quick import loaded

TURNED = """
{q}n = R.nn.rms_norm({q}, g{q}, axes=[-1], epsilon=1e-5)
{q}t = R.reshape({q}n, R.shape([{b}, {s}, {heads}, {d}]))
{q}h = R.strided_slice({q}t, (3,), ({half},), ({d},))
{q}l = R.strided_slice({q}t, (3,), (0,), ({half},))
{q}m = R.negative({q}h)
{q}r = R.concat(({q}m, {q}l), axis=-1)
{q}a = R.multiply({q}t, c)
{q}d = R.multiply({q}r, e)
{q}y = R.add({q}a, {q}d)
"""

CUT = re.compile(r"(\w)t = R.reshape.*")


def rotations(
    sizes: tuple[str, str], heads: tuple[int, int], d: int, whole: bool = False, between: str = ""
) -> ir.IRModule:
    """Return a module with queries and keys; norms are of heads, or of the `whole` rows."""
    b, s = (f"'{size}'" if size.isalpha() else size for size in sizes)
    rows = {q: f"{n * d}" if whole else f"{n}, {d}" for q, n in zip("qk", heads, strict=True)}
    params = ", ".join(f"{q}: R.Tensor(({b}, {s}, {row}), 'float32')" for q, row in rows.items())
    for q, n in zip("qk", heads, strict=True):
        params += f", g{q}: R.Tensor(({n * d if whole else d},), 'float32')"
    params += "".join(f", {a}: R.Tensor(({s}, 1, {d}), 'float32')" for a in "ce")
    form = {"b": sizes[0], "s": sizes[1], "d": d, "half": d // 2}
    first, second = (TURNED.format(q=q, heads=n, **form) for q, n in zip("qk", heads, strict=True))
    if not whole:
        first, second = (CUT.sub(r"\1t = \1n", text) for text in (first, second))
    text = f"{first}{between}{second}y = (qy, ky)\n"
    symbols = ", ".join(size for size in sizes if size.isalpha())
    return FuseNormRotation()(module(params, text, symbols))


def joined(mod: ir.IRModule) -> tvm.tirx.PrimFunc:
    """Return the function that turns both."""
    after = JoinRotations()(mod)
    return next(
        f for g, f in after.functions_items() if g.name_hint.startswith("rms_norm_rotations")
    )


def turned(x: np.ndarray, g: np.ndarray, c: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Return heads behind norm and rotation, in float64."""
    wide = x.astype("float64")
    n = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * g
    n = n.reshape(*x.shape[:2], -1, c.shape[-1])
    half = n.shape[-1] // 2
    return (n * c + np.concatenate([-n[..., half:], n[..., :half]], -1) * e).reshape(x.shape)


@pytest.mark.parametrize("whole", [False, True])
def test_one_call_of_both(whole: bool) -> None:
    before = rotations(("b", "s"), (4, 2), 8, whole)
    after = JoinRotations()(before)
    assert operators(before).count("call_tir") == 2 and operators(after).count("call_tir") == 1


def test_one_that_is_made_of_the_other_stays_apart() -> None:
    mod = rotations(("2", "3"), (2, 2), 8, between="k = qy\n")
    assert JoinRotations()(mod).same_as(mod)


KERNELS = {
    "heads": (("2", "5"), (4, 2), 32, False, 1),
    "an odd number of blocks": (("1", "5"), (4, 2), 16, False, 1),
    "blocks of three heads": (("1", "7"), (12, 5), 8, False, 1),
    "heads of symbolic rows": (("b", "s"), (4, 1), 32, False, 1),
    "rows of many threads": (("2", "5"), (16, 16), 64, True, 1),
    "rows of other threads": (("2", "s"), (64, 8), 32, True, 2),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("target", ["llvm", "h200"])
def test_numbers(name: str, target: str) -> None:
    sizes, heads, d, whole, kernels = KERNELS[name]
    func = joined(rotations(sizes, heads, d, whole))
    gpu = make_target("h200")
    kernel = JoinedRule().attempt(func, host_target() if target == "llvm" else gpu).mod["main"]
    if target == "h200":
        assert lost_reductions(kernel) == 0
        source = compiled(kernel, gpu).mod.imports[0].inspect_source()
        assert source.count("__global__") == 2 * kernels  # declared, then defined
        kernel = RunThreadsInTurn()(tvm.IRModule({"main": kernel}))["main"]
    arrays = [array(shape_of(p), "float32", seed) for seed, p in enumerate(func.params[:-2])]
    results = [tvm.runtime.empty(shape_of(p), "float32") for p in func.params[-2:]]
    library = loaded(compiled(kernel, host_target()))
    library["main"](*map(tvm.runtime.tensor, arrays), *results)
    for got, wanted in zip(results, (turned(*arrays[:4]), turned(*arrays[4:])), strict=True):
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_a_function_of_one_part_is_left() -> None:
    mod = rotations(("2", "5"), (4, 2), 32)
    func = next(f for g, f in mod.functions_items() if g.name_hint == "rms_norm_rotation")
    assert JoinedRule().attempt(func, make_target("h200")) is None
