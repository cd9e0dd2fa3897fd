"""Compile programs unfused and fused, run both, and judge the fused one by float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax
from tvm.target import Target

from relax_fusion import Report
from relax_fusion.legalize import UnshareTransposes
from relax_fusion.lowering import FuseOptions
from relax_fusion.passes import PATTERNS

from ..quick import machine, quick
from .graph import Graph, arrays, evaluate, numpy_dtype, to_relax

ATTEMPTS = (2, 12, 60)
"""Inputs drawn per run; more of them only where fewer show a difference that may be luck."""


@dataclass(frozen=True)
class Setup:
    """How the fused side is made.

    Parameters
    ----------
    passes : tuple of str
        Names of the fusing passes in the order in which they run.
    whole : bool
        Whether the pipeline runs them (in its own order), else a Sequential of their own.
    nt_first : bool
        Whether TVM's FuseTransposeMatmul runs before them.
    tvm_unfused : bool
        Whether the unfused side is TVM's default pipeline, else ours with every pass disabled.
    always : bool
        Whether passes on their own fuse what the estimator predicts to lose, too.
    bounded : bool
        Whether sizes are bounded by the largest that are run: no kernel has ranges beyond them.
    """

    passes: tuple[str, ...] = tuple(PATTERNS)
    whole: bool = True
    nt_first: bool = False
    tvm_unfused: bool = False
    always: bool = False
    bounded: bool = False

    def bounds(self, graphs: Sequence[Graph]) -> dict[str, int]:
        """Return the largest values of symbols, if they are to be known."""
        runs = [run for graph in graphs for run in graph.runs] if self.bounded else []
        return {s: max(run.get(s, 1) for run in runs) for s in {s for run in runs for s in run}}


@dataclass
class Findings:
    """What a campaign saw."""

    graphs: int = 0
    runs: int = 0
    dynamic: int = 0
    fused_graphs: int = 0
    spellings: Counter[tuple[str, str]] = field(default_factory=Counter)
    declines: Counter[tuple[str, str]] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Add the counts of another batch."""
        for name in ("graphs", "runs", "dynamic", "fused_graphs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.spellings.update(other.spellings)
        self.declines.update(other.declines)
        self.dtypes.update(other.dtypes)
        self.failures += other.failures

    def passes(self) -> Counter[str]:
        """Return the number of kernels by pass."""
        total: Counter[str] = Counter()
        for (name, _), count in self.spellings.items():
            total[name] += count
        return total


@dataclass(frozen=True)
class Failure:
    """A program that went wrong, and how."""

    what: str
    graph: Graph
    setup: Setup

    def __str__(self) -> str:
        return f"{self.what}\nwith {self.setup}\n{self.graph}"


class Broken(Exception):
    """A promise that does not depend on numbers was not kept."""


def target() -> Target:
    """Return the CPU that the fuzzer compiles for."""
    return quick(Target("llvm"))


def build(graphs: Sequence[Graph]) -> ir.IRModule:
    """Return a module with the functions ``f0``, ``f1``, ..."""
    builder = relax.BlockBuilder()
    for i, graph in enumerate(graphs):
        to_relax(builder, graph, f"f{i}")
    mod = builder.get()
    relax.analysis.well_formed(mod)
    return mod


def fuse(mod: ir.IRModule, setup: Setup, options: FuseOptions) -> ir.IRModule:
    """Run the fusing passes one at a time, looking at the module after each."""
    if setup.nt_first:
        mod = relax.transform.FuseTransposeMatmul()(UnshareTransposes()(mod))
    for name in setup.passes:
        mod = PATTERNS[name](options)(mod)
        try:
            relax.analysis.well_formed(mod)
        except Exception as error:
            raise Broken(f"the module is not well-formed after {name}: {error}") from error
    for decision in options.decisions:
        refusal = decision.decline
        if refusal is not None and not (refusal.reason and refusal.detail.strip()):
            raise Broken(f"{decision.where}: declined without a reason")
    _settles(mod, setup)
    return mod


def _settles(mod: ir.IRModule, setup: Setup) -> None:
    """Run the passes again: nothing may change."""
    again = mod
    for name in setup.passes:
        again = PATTERNS[name](FuseOptions(target=target()))(again)
    if not tvm_ffi.structural_equal(mod, again, map_free_vars=True):
        raise Broken("running the passes again changes the module")


def pipeline(disable: Sequence[str], **options: Any) -> tvm.transform.Pass:
    """Return our pipeline without the passes named."""
    return relax.get_pipeline("relax_fusion", target=target(), disable=tuple(disable), **options)


def _machine(mod: ir.IRModule, passes: tvm.transform.Pass | str) -> relax.VirtualMachine:
    executable = tvm.compile(mod, target(), relax_pipeline=passes)
    return machine(executable)


def check(graphs: Sequence[Graph], setup: Setup) -> Findings:
    """Compile a batch of programs both ways and compare; failures are in the findings."""
    mod = build(graphs)
    report, bounds = Report(), setup.bounds(graphs)
    options = FuseOptions(target=target(), always_fuse=setup.always, bounds=bounds)
    unfusing = pipeline(tuple(PATTERNS), variable_bounds=bounds)
    if setup.whole:
        others = [name for name in PATTERNS if name not in setup.passes]
        fused = _machine(mod, pipeline(others, report=report, variable_bounds=bounds))
        fuse(mod, setup, replace(options, decisions=[]))
    else:
        made = fuse(mod, setup, replace(options, decisions=report.decisions))
        fused = _machine(made, unfusing)
    unfused = _machine(mod, "default" if setup.tvm_unfused else unfusing)
    found = Findings()
    hit = {d.function for d in report.fused}
    for d in report.decisions:
        if d.fused:
            found.spellings[d.pattern, d.spelling] += 1
        else:
            assert d.decline is not None
            found.declines[d.pattern, d.decline.reason.value] += 1
    for i, graph in enumerate(graphs):
        found.graphs += 1
        found.dynamic += graph.dynamic
        found.fused_graphs += f"f{i}" in hit
        found.dtypes[graph.nodes[0].dtype] += 1
        found.runs += len(graph.runs)
        what = _compare(graph, unfused[f"f{i}"], fused[f"f{i}"])
        if what is not None:
            found.failures.append(Failure(what, graph, setup))
    return found


def isolate(graphs: Sequence[Graph], setup: Setup) -> Findings:
    """Check a batch; if the whole of it breaks, check its programs one at a time."""
    try:
        return check(graphs, setup)
    except Exception as error:
        if len(graphs) == 1:
            what = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:300]}"
            return Findings(graphs=1, failures=[Failure(what, graphs[0], setup)])
    found = Findings()
    for graph in graphs:
        found.add(isolate([graph], setup))
    return found


# --- numbers ---------------------------------------------------------------------------------

Run = Callable[..., Any]


def _results(function: Run, graph: Graph, given: dict[int, np.ndarray]) -> list[np.ndarray]:
    params = [i for i, n in enumerate(graph.nodes) if n.op == "param"]
    out = function(*(tvm.runtime.tensor(given[i]) for i in params))
    tensors = [out] if len(graph.outputs) == 1 else list(out)
    return [t.numpy().astype(np.float64) for t in tensors]


@dataclass
class _Error:
    """Largest errors of one output so far, as fractions of its largest value."""

    fused: float = 0.0
    unfused: float = 0.0

    def exceeds(self, step: float) -> bool:
        return self.fused > 2.0 * self.unfused + step


def rounding_step(dtype: str) -> float:
    """Return the distance from 1 to the next number of a dtype."""
    return float(ml_dtypes.finfo(numpy_dtype(dtype)).eps)


def _compare(graph: Graph, unfused: Run, fused: Run) -> str | None:
    """Return what is wrong with the fused program, None if nothing is.

    The error of an output is its largest distance from float64 relative to its largest value, over
    several inputs: with one input, a small tensor's unfused error may be zero by luck.
    """
    for run in graph.runs:
        errors = [_Error() for _ in graph.outputs]
        done = 0
        for attempts in ATTEMPTS:
            for attempt in range(done, attempts):
                what = _once(graph, (unfused, fused), (run, attempt), errors)
                if what is not None:
                    return what
            done = attempts
            bad = [
                (o, e)
                for o, e in zip(graph.outputs, errors, strict=True)
                if e.exceeds(rounding_step(graph.nodes[o].dtype))
            ]
            if not bad:
                break
        else:
            output, error = bad[0]
            return (
                f"%{output} at {dict(run)}: relative error {error.fused:.3g} fused, "
                f"{error.unfused:.3g} unfused"
            )
    return None


def _once(
    graph: Graph,
    functions: tuple[Run, Run],
    which: tuple[Any, int],
    errors: list[_Error],
) -> str | None:
    """Run both programs on one input and update the errors."""
    run, attempt = which
    given = arrays(graph, run, attempt)
    with np.errstate(all="ignore"):
        wanted = evaluate(graph, given, run)
    plain, ours = (_results(f, graph, given) for f in functions)
    for output, error, ref, a, b in zip(graph.outputs, errors, wanted, plain, ours, strict=True):
        if not a.shape == b.shape == ref.shape:
            return f"%{output} at {dict(run)}: shapes {b.shape}, unfused {a.shape}, {ref.shape}"
        finite = np.isfinite(ref) & np.isfinite(a)
        if not np.isfinite(b[finite]).all():
            return f"%{output} at {dict(run)}: NaN or infinity that the unfused program has not"
        magnitude = np.abs(ref[finite]).max(initial=0.0)
        if magnitude == 0.0:
            magnitude = 1.0
        plain_error, our_error = (np.abs(x[finite] - ref[finite]).max(initial=0.0) for x in (a, b))
        error.unfused = max(error.unfused, plain_error / magnitude)
        error.fused = max(error.fused, our_error / magnitude)
    return None


# --- minimising ------------------------------------------------------------------------------


def minimise(failure: Failure, budget: int = 60) -> Failure:
    """Return a smaller program that goes wrong in the same setup.

    Outputs are dropped, and values replaced by parameters, as long as something is still wrong.
    """
    best, tried = failure, True
    while tried:
        tried = False
        for smaller in _smaller(best.graph):
            if budget <= 0:
                return best
            budget -= 1
            found = isolate([smaller], best.setup).failures
            if found:
                best, tried = found[0], True
                break
    return best


def _smaller(graph: Graph) -> list[Graph]:
    """Return the programs that are one step simpler, the much simpler ones first."""
    candidates = []
    if len(graph.outputs) > 1:
        candidates += [replace(graph, outputs=(o,)) for o in graph.outputs]
    if graph.cut is not None:
        candidates.append(replace(graph, cut=None))
    leaves = ("param", "const", "scalar", "split")
    results = set(graph.outputs)
    inner = [i for i, n in enumerate(graph.nodes) if n.op not in leaves and i not in results]
    middle = len(inner) // 2
    if len(results) == 1:
        earlier = (*inner[-1:], *inner[middle:])
        candidates += [replace(graph, outputs=(i,)) for i in earlier]
    for i in (*inner[middle:], *inner[:middle]):
        node = graph.nodes[i]
        leaf = replace(node, op="param", args=(), attrs={"kind": "data"})
        candidates.append(replace(graph, nodes=(*graph.nodes[:i], leaf, *graph.nodes[i + 1 :])))
    return [prune(c) for c in candidates]


def prune(graph: Graph) -> Graph:
    """Drop the nodes that no output needs; parameters that define a symbol stay."""
    needed = set(graph.outputs)
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in needed:
            needed |= set(graph.nodes[i].args)
    for i, node in enumerate(graph.nodes):
        if node.op == "param" and any(d.symbols for d in node.shape):
            needed.add(i)
    kept = sorted(needed)
    number = {old: new for new, old in enumerate(kept)}
    nodes = tuple(
        replace(graph.nodes[i], args=tuple(number[a] for a in graph.nodes[i].args)) for i in kept
    )
    cut = None
    if graph.cut is not None:
        cut = sum(1 for i in kept if i < graph.cut)
    return replace(graph, nodes=nodes, outputs=tuple(number[o] for o in graph.outputs), cut=cut)
