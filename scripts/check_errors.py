"""Errors of imported models against float64, ours over those of TVM's default pipeline.

    python scripts/check_errors.py [--families vit gpt2] [--output RESULTS.json]

Every module of ``tests/data/models`` runs on this CPU with random weights and inputs; dynamic ones
at several sizes.  What is exact is computed by the interpreter that validates matches, in float64.
A file of results that is there is continued; the table is written beside it.  Exit status 1 if a
module fails, or a ratio is above the limit.

The root of the mean square error (RMS) and the largest error are each divided by those of TVM's.
As the largest is that of one element, one unit in the last place of the largest number in the
result is allowed to either: TVM's counts as that at the least.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, tirx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arguments import results_file
from benchmarks.recording import facts, markdown_table, results, write_results
from relax_fusion import host_target
from relax_fusion.canonical import MendImports
from relax_fusion.equivalence.interpreter import evaluate
from tests.fuzz.processes import in_processes
from tests.support.imported import families, load

LIMIT = 1.2
"""Of the errors of TVM's default pipeline."""

SIZES = ((2, 24), (1, 7), (3, 33))
"""Batches and lengths at which dynamic modules run."""

SEEDS = range(3)
"""Static ones run as often with other numbers."""

SECONDS = 600
"""Limit for one module."""

WORDS = 512
"""Tokens that the models know."""

HEAD = ("module", "RMS error", "TVM's", "ratio", "largest error", "TVM's", "ratio")

Run = Callable[[list[np.ndarray]], np.ndarray]
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--families", nargs="+", default=families(), choices=families(), metavar="FAMILY")
    add("--only", default="", metavar="TEXT", help="modules whose name has it, such as -f16-")
    add("--output", type=results_file, default=Path("out/check_errors.json"), help="JSON file")
    args = parser.parse_args()
    before = results(args.output, "rows") if args.output.exists() else {"rows": {}}
    record = {**before, **facts()}
    modules = {tag: mod for family in args.families for tag, mod in load(family)}
    asked = [tag for tag in modules if args.only in tag and tag not in record["rows"]]
    for tag, found in in_processes(lambda tag: compared(modules[tag]), asked, SECONDS):
        row = {"failed": found} if isinstance(found, str) else found
        print(tag, row, flush=True)
        record["rows"][tag] = row
        write_results(args.output, record, report(record))
    sys.exit(any(map(is_bad, record["rows"].values())))


# --- one module --------------------------------------------------------------------------------


def compared(mod: ir.IRModule) -> Row:
    """Return the errors of both, over the largest number of the exact results."""
    ours, theirs = compiled(mod, "relax_fusion"), by_default(mod)
    squares, most, largest, count = np.zeros(2), np.zeros(2), 0.0, 0
    for inputs in numbers(mod):
        exact = first(evaluate(mod["main"], inputs))
        got = [run(inputs) for run in (ours, theirs)]
        errors = [np.abs(y.astype("float64") - exact) for y in got]
        squares += [np.square(e).sum() for e in errors]
        most = np.maximum(most, [e.max() for e in errors])
        largest, count = max(largest, float(np.abs(exact).max())), count + exact.size
    unit = float(np.spacing(np.array(largest, got[0].dtype)))
    rms = np.sqrt(squares / count)
    return {
        "rms": (rms / largest).tolist(),
        "rms_ratio": float(rms[0] / rms[1]),
        "largest": (most / largest).tolist(),
        "largest_ratio": float(most[0] / max(most[1], unit)),
    }


def by_default(mod: ir.IRModule) -> Run:
    """Compile as TVM does by default, if need be what its importers write mended before."""
    try:
        return compiled(mod, "default")
    except Exception:  # of TVM, of any type
        return compiled(MendImports()(mod), "default")


def compiled(mod: ir.IRModule, pipeline: str) -> Run:
    target = host_target()
    options = {"target": target} if pipeline == "relax_fusion" else {}
    executable = tvm.compile(mod, target, relax_pipeline=relax.get_pipeline(pipeline, **options))
    run = relax.VirtualMachine(executable, tvm.cpu())["main"]
    return lambda inputs: first(run(*map(tvm.runtime.tensor, inputs))).numpy()


def first(result: Any) -> Any:
    """Return the first tensor of what a function returns."""
    while isinstance(result, list | tuple | tvm_ffi.Array):
        result = result[0]
    return result


def numbers(mod: ir.IRModule) -> Iterator[list[np.ndarray]]:
    """Yield arguments of the function: at every size, or if all are static by every seed."""
    params = mod["main"].params
    is_static = all(isinstance(d, tirx.IntImm) for p in params for d in p.ty.shape.values)
    for seed in SEEDS:
        sizes = SIZES[0 if is_static else seed]
        yield [given(p, sizes, seed) for p in params]


def given(param: relax.Var, sizes: tuple[int, int], seed: int) -> np.ndarray:
    """Return an argument, of which products and norms stay near 1."""
    dims = param.ty.shape.values
    shape = [int(d) if isinstance(d, tirx.IntImm) else sizes[axis] for axis, d in enumerate(dims)]
    rng = np.random.default_rng([seed, zlib.crc32(param.name.encode())])
    dtype = str(param.ty.dtype)
    if "int" in dtype:
        return rng.integers(0, WORDS, shape).astype(dtype)
    array = rng.standard_normal(shape)
    if len(shape) == 1:
        array = 0.1 * array + ("weight" in param.name)
    elif "weight" in param.name:
        array /= np.sqrt(max(shape))
    return array.astype(dtype)


# --- what is said ------------------------------------------------------------------------------


def is_bad(row: Row) -> bool:
    return "failed" in row or max(row["rms_ratio"], row["largest_ratio"]) > LIMIT


def report(record: dict[str, Any]) -> str:
    table = [HEAD]
    for tag, row in sorted(record["rows"].items()):
        if "failed" in row:
            table.append((tag, row["failed"].splitlines()[-1][:100], *[""] * 5))
            continue
        errors = [
            (f"{row[kind][0]:.1e}", f"{row[kind][1]:.1e}", f"{row[kind + '_ratio']:.2f}")
            for kind in ("rms", "largest")
        ]
        table.append((tag, *errors[0], *errors[1]))
    bad = sum(map(is_bad, record["rows"].values()))
    machine = ", ".join([record["cpu"], *(f"{k} {v}" for k, v in record["versions"].items())])
    return "\n\n".join(
        [
            f"# Errors of imported models against float64, {record['date']}",
            f"{machine}.",
            *__doc__.split("\n\n")[2:],
            "Errors are over the largest number of the result.",
            f"{len(table) - 1} modules, {bad} above {LIMIT} or failed.",
            markdown_table(table) + "\n",
        ]
    )


if __name__ == "__main__":
    main()
