"""Chains that TVM's FuseOps makes slower (apache/tvm 20342, 20401): fused, partly, not, and by us.

All four go through our pipeline, so that they have the same schedules: only the groups differ.
Ours is never to be slower than the fastest of the others.
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import tvm
from tvm import ir, relax
from tvm.relax import op

from benchmarks.report import Entry, Verdict
from benchmarks.suite import Suite
from relax_fusion import make_target
from relax_fusion.options import make_options
from relax_fusion.phases import run_phases
from relax_fusion.pipeline import PHASES, phase2_lower
from relax_fusion.timing import host_and_device, in_turn

ROUNDS, REPEATS = 5, 5
SIDE = 4096
SLOWER = 1.05
"""Ours may take so many times as long as the fastest: what is left of noise."""

OPAQUE = {"exp-8": "add", "exp-16": "add", "pool": "max_pool2d"}
"""Where the issues cut a chain: the operator that is a kernel of its own if it is partly fused."""


def module(case: str) -> ir.IRModule:
    """Return the chain of an issue."""
    builder = relax.BlockBuilder()
    half = {"exp": "float16", "pool": "float32"}[case.partition("-")[0]]
    shapes = (
        [(1, 16, 64, 64), *[(1, 144, 32, 32)] * 2] if case == "pool" else [(SIDE, 1), (SIDE, SIDE)]
    )
    x, *others = (relax.Var(f"p{i}", relax.TensorType(s, half)) for i, s in enumerate(shapes))
    with builder.function("main", [x, *others]):
        with builder.dataflow():
            results = (
                _pool(builder, x, *others) if case == "pool" else _exp(builder, x, *others, case)
            )
            outs = [builder.emit_output(r) for r in results]
        builder.emit_func_output(outs[0] if len(outs) == 1 else relax.Tuple(outs))
    return builder.get()


def _exp(builder: relax.BlockBuilder, x: relax.Var, b: relax.Var, case: str) -> list[relax.Expr]:
    z = x
    for _ in range(int(case.partition("-")[2])):
        scaled = builder.emit(op.multiply(relax.const(0.5, "float16"), z))
        z = builder.emit(op.exp(builder.emit(op.subtract(x, scaled))))
    return [op.add(b, z)]


def _pool(
    builder: relax.BlockBuilder, x: relax.Var, a: relax.Var, b: relax.Var
) -> list[relax.Expr]:
    parts = [builder.emit(op.add(x, relax.const(float(i), "float32"))) for i in range(9)]
    thirds = [builder.emit(op.concat(parts[i : i + 3], 1)) for i in (0, 3, 6)]
    pooled = builder.emit(op.nn.max_pool2d(builder.emit(op.concat(thirds, 1)), (2, 2), (2, 2)))
    return [op.add(pooled, a), op.add(pooled, b)]


@tvm.transform.module_pass(opt_level=0, name="Apart")
class _Apart:
    """Marks an operator as one that is a kernel of its own."""

    def __init__(self, name: str):
        self.name = name

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        for gvar, func in mod.functions_items():
            if gvar.name_hint == self.name:
                mod.update_func(gvar, func.with_attr("op_pattern", 8))
        return mod


def pipeline_with(how: str, target: tvm.target.Target, options: dict[str, Any]) -> Any:
    """Return our pipeline, with FuseOps or an opaque operator in place of our plans.

    Our plans also have kernels read what is moved for them where it was, which FuseOps leaves.

    Parameters
    ----------
    how : str
        ``"ours"``, ``"fuseops"``, ``"apart"`` for no groups, or the name of an operator that is a
        kernel of its own while FuseOps fuses the others.
    target : Target
        What is compiled for.
    options : dict
        Of the pipeline.
    """
    fuse = relax.transform.FuseOps()
    groups = {"fuseops": [fuse], "apart": []}.get(how, [_Apart(how), fuse])

    def lower(options: Any) -> list[tvm.transform.Pass]:
        instead = {"FuseGroups": groups, "ComposeMovements": []}
        return [q for p in phase2_lower(options) for q in instead.get(p.info.name, [p])]

    phases = [
        (f, lower if phase is phase2_lower and how != "ours" else phase, d)
        for f, phase, d in PHASES
    ]
    return run_phases(make_options(target, options), phases)


def compiled(case: str, how: str, target: str) -> tvm.runtime.Executable:
    """Compile a chain with groups of a kind."""
    chosen = make_target(target)
    how = {"fused": "fuseops", "partly": OPAQUE[case]}.get(how, how)
    return tvm.compile(module(case), chosen, relax_pipeline=pipeline_with(how, chosen, {}))


class Groups(Suite):
    """Each chain by all four."""

    name = "bench_groups"
    cases = ("exp-8", "exp-16", "pool")
    contenders = usual = ("fused", "partly", "apart", "ours")
    plain: ClassVar = {"on": "llvm"}
    has_target, must_reach = False, True
    head = ("chain", *contenders, "fastest of the others / ours")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--on", default="llvm", help="what is compiled for (default: llvm)")

    @classmethod
    def of(cls, args: Namespace) -> Suite:
        return (Groups if args.on == "llvm" else OnGpu)(args)

    def measured(self, item: tuple[str]) -> Entry:
        dev = tvm.cpu() if self.device == "cpu" else tvm.cuda()
        rng = np.random.default_rng(0)
        types = [p.ty for p in module(*item)["main"].params]
        arrays = [rng.uniform(-0.25, 0.25, [int(d) for d in t.shape.values]) for t in types]
        args = [
            tvm.runtime.tensor(a.astype(str(t.dtype)), dev)
            for a, t in zip(arrays, types, strict=True)
        ]

        def timer(how: str) -> Callable[[int], list[float]]:
            main = relax.VirtualMachine(compiled(*item, how, self.args.on), dev)["main"]
            results[how] = _numbers(main(*args))
            return lambda _: host_and_device(lambda: main(*args), dev.sync, 3, REPEATS)[1]

        results: dict[str, list[np.ndarray]] = {}
        found = in_turn({how: timer(how) for how in self.asked(item)}, ROUNDS)
        wrong = [how for how, made in results.items() if not _close(made, results["apart"])]
        us = {how: 1e6 * statistics.median(times) for how, times in found.items()}
        return {"us": us, "wrong": wrong}

    def intro(self, record: Entry) -> str:
        return f"{record.get('gpu') or record['cpu']}; medians, contenders in turn."

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        us = entry["us"]
        cells = (f"{us[how]:.1f} us" if how in us else "" for how in self.contenders)
        return entry["case"], *cells, f"{_gain(us):.2f}"

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        return [(entry["case"], "vs the fastest of the others", 1 / SLOWER, _gain(entry["us"]))]


class OnGpu(Groups):
    """The same on a GPU."""

    device = "gpu"


def _gain(us: dict[str, float]) -> float:
    return min((t for how, t in us.items() if how != "ours"), default=np.inf) / us["ours"]


def _numbers(result: Any) -> list[np.ndarray]:
    return [t.numpy() for t in ([result] if hasattr(result, "numpy") else result)]


def _close(made: list[np.ndarray], wanted: list[np.ndarray]) -> bool:
    pairs = zip(made, wanted, strict=True)
    return all(np.allclose(a.astype("float64"), b, 2e-2, 2e-2) for a, b in pairs)
