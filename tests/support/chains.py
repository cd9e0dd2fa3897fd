"""Chains written down in few words, and what the tests do with them.

A `Chain` is a Relax function: its tensors, its bindings in TVMScript, its result.  Many of them go
into one module, which is compiled once fused and once not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import tvm
from tvm import ir, relax

from relax_fusion import PATTERNS, Decision, FuseOptions, FusePatterns, Reason, host_target
from relax_fusion.workload.reference import numpy_dtype

from .accuracy import assert_accurate
from .buffers import unaligned
from .chain_reference import evaluate
from .quick import machine, quickly

VALIDATE = "strict"
"""Every match in these tests is checked against what it replaces."""

HEADER = """
@I.ir_module
class Module:
"""


@dataclass(frozen=True)
class Chain:
    """A Relax function.

    Parameters
    ----------
    name : str
        Its name in the module and in test reports.
    inputs : str
        ``"x[b,s,32] W[48,32]:float16 n:shape"``: tensors with their shapes; a dtype of its own
        after a colon.  Names among the dimensions are symbolic.
    body : str
        Bindings of a dataflow block, one a line (or after a semicolon).
    result : str
        What the function returns; names among its parts are outputs of the block.
    sizes : dict of str to int
        Values of the symbolic dimensions when it is run.
    dtype : str
        Of the inputs that do not say otherwise.
    """

    name: str
    inputs: str
    body: str
    result: str
    sizes: dict[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    dataflow: bool = True

    def tensors(self) -> list[tuple[str, list[str], str]]:
        """Return name, dimensions and dtype of every input."""
        found = re.findall(r"(\w+)\[([^\]]*)\](?::(\w+))?", self.inputs)
        return [(n, [d for d in dims.split(",") if d], t or self.dtype) for n, dims, t in found]

    def script(self) -> str:
        """Return the function as TVMScript."""
        params, symbols = [], set()
        for name, dims, dtype in self.tensors():
            symbols |= {d for d in dims if d.isidentifier()}
            shape = ", ".join(f'"{d}"' if d.isidentifier() else d for d in dims)
            params.append(f'{name}: R.Tensor(({shape}{"," if len(dims) == 1 else ""}), "{dtype}")')
        lines = [f"{s} = T.int64()" for s in sorted(symbols)]
        bindings = [line.strip() for line in re.split(r"[;\n]", self.body) if line.strip()]
        made = {line.split("=")[0].strip() for line in bindings}
        outputs = [v for v in re.findall(r"\w+", self.result) if v in made]
        inner = [*bindings, f"R.output({', '.join(outputs)})"] if self.dataflow else bindings
        if self.dataflow:
            lines += ["with R.dataflow():", *(f"    {line}" for line in inner)]
        else:
            lines += inner
        lines += [f"return {self.result}"]
        text = "".join(f"        {line}\n" for line in lines)
        return f"    @R.function\n    def {self.name}({', '.join(params)}):\n{text}"

    def arrays(self) -> list[np.ndarray]:
        """Return inputs of unit size (weights smaller, so that results are of unit size too).

        Booleans are masks: of what is seen, or of what is hidden if their name begins with h.
        """
        rng = np.random.default_rng(7)
        out = []
        for name, dims, dtype in self.tensors():
            shape = [self.sizes[d] if d.isidentifier() else int(d) for d in dims]
            values = rng.standard_normal(shape)
            if dtype == "bool":
                values = values > -1  # most keys are seen, the first one always
                values[..., 0] = True
                values = ~values if name.startswith("h") else values
            elif name.startswith("W"):
                values /= np.sqrt(shape[0])
            out.append(values.astype(numpy_dtype(dtype)))
        return out


def module(chains: Iterable[Chain], header: str = "") -> ir.IRModule:
    """Parse chains into one module; `header` goes in front of them, inside the class."""
    return tvm.script.from_source(HEADER + header + "".join(c.script() for c in chains))


def run_pass(mod: ir.IRModule, name: str, **options: object) -> tuple[ir.IRModule, list[Decision]]:
    """Apply a fusing pass, or all; return the new module, well formed, and their decisions."""
    decisions: list[Decision] = []
    given = FuseOptions(
        **{"target": host_target(), "decisions": decisions, "validate": VALIDATE, **options}
    )
    made = FusePatterns if name == "FusePatterns" else PATTERNS[name]
    out = made(given)(mod)
    again = made(replace(given, decisions=None))(out)
    tvm.ir.assert_structural_equal(again, out, map_free_vars=True)
    relax.analysis.well_formed(out)  # raises
    return out, decisions


def fused(chain: Chain, name: str) -> tuple[relax.Function, Decision]:
    """Apply one pass to one chain that it must fuse into one kernel, whether that pays or not."""
    mod, decisions = run_pass(module([chain]), name, always_fuse=True)
    assert [str(d.decline) for d in decisions if not d.fused] == []
    assert len(decisions) == 1
    return mod[chain.name], decisions[0]


def calls(func: relax.Function) -> list[str]:
    """Return the operators of a function in order; a fused kernel under the name of its pass."""
    names: list[str] = []
    for block in func.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.Call) and isinstance(value.op, ir.Op):
                names.append(value.op.name.removeprefix("relax."))
    return names


def kernel_args(func: relax.Function) -> list[list[str]]:
    """Return the names of the tensors of each kernel, reshapes looked through."""
    made = {b.var: b.value for block in func.body.blocks for b in block.bindings}
    kernels = [v for v in made.values() if _is(v, "relax.call_tir")]
    return [[_name(made, a) for a in kernel.args[1].fields] for kernel in kernels]


def _name(made: dict[relax.Var, relax.Expr], expr: relax.Expr) -> str:
    while _is(made.get(expr), "relax.reshape"):
        expr = made[expr].args[0]
    return expr.name if isinstance(expr, relax.Var) else str(expr)


def _is(value: relax.Expr | None, op: str) -> bool:
    return isinstance(value, relax.Call) and isinstance(value.op, ir.Op) and value.op.name == op


def assert_declined(mod: ir.IRModule, name: str, reason: Reason, words: str = "") -> Decision:
    """Check that a pass leaves the module as it is, for `reason`, and says `words` about it."""
    out, decisions = run_pass(mod, name)
    tvm.ir.assert_structural_equal(out, mod)
    assert [d.decline.reason for d in decisions if d.decline] == [reason]
    assert words in decisions[0].decline.detail
    return decisions[0]


def assert_untouched(mod: ir.IRModule, name: str) -> None:
    """Check that a pass sees no chain of its own in a module."""
    out, decisions = run_pass(mod, name)
    tvm.ir.assert_structural_equal(out, mod)
    assert decisions == []


def compiled(
    mod: ir.IRModule, chains: Iterable[Chain] = (), **options: object
) -> relax.VirtualMachine:
    """Compile a module with the pipeline, for the sizes of `chains` if there are any.

    A kernel has fewer ranges of rows then.
    """
    bounds: dict[str, int] = {}
    for name, size in (item for chain in chains for item in chain.sizes.items()):
        bounds[name] = max(size, bounds.get(name, 1))
    options = {"variable_bounds": bounds, **options}
    pipeline = relax.get_pipeline("relax_fusion", target="llvm", **options)
    return machine(quickly(mod, pipeline))


def outputs(vm: relax.VirtualMachine, name: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Run a function on arrays at no aligned address; always return a list of arrays."""
    got = vm[name](*map(unaligned, arrays))
    return [got.numpy()] if isinstance(got, tvm.runtime.Tensor) else [g.numpy() for g in got]


def assert_numbers(vm: relax.VirtualMachine, mod: ir.IRModule, chain: Chain) -> None:
    """Check a compiled chain against float64, by `assert_accurate`.

    The roundings that are allowed are those of the chain's own operators, in their dtypes.  Where
    the inputs are rounded coarser than the results, the kernel may still not round to the inputs'
    dtype inside, so nothing is allowed for them.
    """
    func, arrays = mod[chain.name], chain.arrays()
    exact = evaluate(func, arrays)
    moved = [evaluate(func, arrays, noise=np.random.default_rng(seed)) for seed in range(4)]
    bindings = [b for block in func.body.blocks for b in block.bindings]
    made = {str(b.var.ty.dtype) for b in bindings if isinstance(b.var.ty, relax.TensorType)}
    # Sums are float32: they matter where nothing is rounded coarser.
    longest = 0 if made & {"float16", "bfloat16"} else max(d for a in arrays for d in a.shape)
    found = outputs(vm, chain.name, arrays)
    assert len(found) == len(exact)
    for number, got in enumerate(found):
        near = np.stack([m[number] for m in moved])
        assert_accurate(got, exact[number], near, str(got.dtype), longest)
