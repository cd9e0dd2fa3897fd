"""Modules before and after a canonicalising pass, computed by numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import tvm
from tvm import ir, relax
from tvm.ir.transform import Pass

from relax_fusion.equivalence.interpreter import Interpreter
from relax_fusion.equivalence.sizes import Sizes

SIZES = ((2, 3), (1, 1), (3, 2))


def module(params: str, body: str, symbols: str = "b, s") -> ir.IRModule:
    """Return ``main`` of a few lines, of which `y` is the result."""
    names = [n.strip() for n in symbols.split(",") if n]
    declared = "".join(f"{n} = T.int64()\n        " for n in names)
    lines = "\n            ".join(line.strip() for line in body.strip().splitlines())
    text = f"""
@I.ir_module
class Module:
    @R.function
    def main({params.replace("'", '"')}):
        {declared}with R.dataflow():
            {lines}
            R.output(y)
        return y
"""
    return tvm.script.from_source(text)


def operators(mod: ir.IRModule) -> list[str]:
    """Return the operators of ``main`` in order."""
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    calls = [b.value for b in bindings if isinstance(b.value, relax.Call)]
    return [c.op.name.removeprefix("relax.") for c in calls if isinstance(c.op, ir.Op)]


def drawn(mod: ir.IRModule, symbols: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Return random inputs of ``main`` by name."""
    func, rng, values = mod["main"], np.random.default_rng(seed), {}
    sizes = _sizes(func, symbols)
    for param in func.params:
        shape, dtype = sizes.shape(param.ty.shape.values), str(param.ty.dtype)
        value = rng.integers(0, 4, shape) if "int" in dtype else rng.standard_normal(shape)
        values[param.name] = value.astype("int64" if "int" in dtype else "float64")
    return values


def _sizes(func: relax.Function, symbols: Mapping[str, int]) -> Sizes:
    return Sizes({v: symbols[v.name] for v in relax.analysis.defined_symbolic_vars(func)})


def computed(
    mod: ir.IRModule,
    symbols: Mapping[str, int],
    seed: int = 0,
    inputs: Mapping[str, np.ndarray] | None = None,
) -> np.ndarray:
    """Return the result of ``main``, for random inputs by default; every shape is checked."""
    func = mod["main"]
    sizes, arrays = _sizes(func, symbols), inputs or drawn(mod, symbols, seed)
    values = {param: arrays[param.name] for param in func.params}
    bound = [(b.var, b.value) for block in func.body.blocks for b in block.bindings]
    worker = Interpreter(mod=mod)
    worker.run(bound, values, sizes)
    return worker.value(func.body.body, values, sizes)


def assert_same_numbers(before: ir.IRModule, after: ir.IRModule, rtol: float = 1e-9) -> None:
    """Compare two modules at several sizes of their symbols."""
    relax.analysis.well_formed(after)  # raises
    names = {v.name for v in relax.analysis.defined_symbolic_vars(before["main"])}
    for (b, s), seed in itertools.product(SIZES if names else SIZES[:1], range(2)):
        symbols = {name: b if name == "b" else s for name in names}
        want, got = computed(before, symbols, seed), computed(after, symbols, seed)
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)


def assert_chains_keep_numbers(
    canonical: Pass, drawn: Callable[[int], ir.IRModule], seeds: Iterable[int]
) -> None:
    """Compare random modules before and after a pass; a second run finds nothing."""
    changed = 0
    for seed in seeds:
        before = drawn(seed)
        after = canonical(before)
        changed += not after.same_as(before)
        assert_same_numbers(before, after)
        assert canonical(after).same_as(after), f"a second run changes the module of seed {seed}"
    assert changed > 3
