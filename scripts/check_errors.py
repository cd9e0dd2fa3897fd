"""Errors of imported models against float64, ours over those of TVM's default pipeline.

    python scripts/check_errors.py [--families vit gpt2] [--output RESULTS.json]

Every module of ``tests/data/models`` runs on this CPU with random weights and inputs; dynamic ones
at several sizes.  What is exact is computed by the interpreter that validates matches, in float64.
A file of results that is there is continued; the table is written beside it.  Exit status 1 if a
module fails, or a ratio is above the limit.

TVM compiles a dynamic module for each size by itself, as it takes few of them whole.  The root of
the mean square error (RMS) and the largest error are each divided by those of TVM's.
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
from relax_fusion.canonical import MendImports, MultiplyConvolutions
from relax_fusion.equivalence.interpreter import evaluate
from tests.fuzz.processes import in_processes
from tests.support.imported import families, load

LIMIT = 1.2
"""Of the errors of TVM's default pipeline."""

SIZES = ((2, 24), (1, 7), (3, 33))
"""Batches and lengths at which dynamic modules run; others run as often."""

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
    done = {tag for tag, row in record["rows"].items() if "failed" not in row}
    asked = [tag for tag in modules if args.only in tag and tag not in done]
    for tag, found in in_processes(lambda tag: compared(modules[tag]), asked, SECONDS):
        row = {"failed": found} if isinstance(found, str) else found
        print(tag, row, flush=True)
        record["rows"][tag] = row
        write_results(args.output, record, report(record))
    sys.exit(any(map(is_bad, record["rows"].values())))


# --- one module --------------------------------------------------------------------------------


def compared(mod: ir.IRModule) -> Row:
    """Return the errors of both, over the largest number of the exact results."""
    ours = compiled(mod, "relax_fusion")
    squares, most, largest, count = np.zeros(2), np.zeros(2), 0.0, 0
    for sizes, inputs in numbers(mod):
        static = relax.transform.BindSymbolicVars(sizes)(mod)
        readable = MultiplyConvolutions()(static)
        exact = first(evaluate(readable["main"], inputs, mod=readable))
        theirs = compiled(counted_from_front(MendImports()(static)), "default")
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


def compiled(mod: ir.IRModule, pipeline: str) -> Run:
    target = host_target()
    options = {"target": target} if pipeline == "relax_fusion" else {}
    executable = tvm.compile(mod, target, relax_pipeline=relax.get_pipeline(pipeline, **options))
    run = relax.VirtualMachine(executable, tvm.cpu())["main"]
    return lambda inputs: first(run(*map(tvm.runtime.tensor, inputs))).numpy()


def counted_from_front(mod: ir.IRModule) -> ir.IRModule:
    """Give slices axes from 0 on: TVM 0.27 legalises no other of static shapes."""

    def slice_of(call: relax.Call) -> relax.Call:
        if getattr(call.op, "name", "") != "relax.strided_slice":
            return call
        x, axes, *others = call.args
        places = [tirx.IntImm("int64", int(axis) % x.ty.ndim) for axis in axes]
        return relax.Call(call.op, [x, relax.Tuple(places), *others], call.attrs)

    main = mod["main"]
    body = tvm_ffi.structural_map(main.body, (ir.Call, slice_of))
    new = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    return relax.transform.Normalize()(
        ir.IRModule({**mod.functions, mod.get_global_var("main"): new})
    )


def first(result: Any) -> Any:
    """Return the first tensor of what a function returns."""
    while isinstance(result, list | tuple | tvm_ffi.Array):
        result = result[0]
    return result


def numbers(mod: ir.IRModule) -> Iterator[tuple[dict[tirx.Var, int], list[np.ndarray]]]:
    """Yield sizes and arguments of the function, three times."""
    params = mod["main"].params
    dims = [(axis, d) for p in params for axis, d in enumerate(p.ty.shape.values)]
    symbols = {d: axis for axis, d in dims if isinstance(d, ir.Var)}
    for seed, chosen in enumerate(SIZES):
        sizes = {symbol: chosen[axis] for symbol, axis in symbols.items()}
        yield sizes, [given(p, sizes, seed) for p in params]


def given(param: relax.Var, sizes: dict[tirx.Var, int], seed: int) -> np.ndarray:
    """Return an argument, of which products and norms stay near 1."""
    shape = [sizes[d] if d in sizes else int(d) for d in param.ty.shape.values]
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
