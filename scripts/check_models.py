"""Try every schedule rule on every function of MLC-LLM's models.

    python scripts/check_models.py --mlc-llm PATH [--models llama gemma2] [--targets llvm h200]

Each model keeps its own widths and has few layers.  It is exported, and lowered by MLC-LLM's own
passes up to where schedules begin; no weights and no GPU are needed.  Every rule gets every
function, alone and in the pipeline's order: none may raise.  With --pipeline, our pipeline gets the
exported module as well, and the weights that it decodes to memory are counted; --only-weights does
nothing but that.  With --check, what our rules schedule is compiled, and on this CPU run: it
must compute what TVM's own loops do.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import _mlc_llm as mlc
import tvm_ffi
from _model_numbers import Numbers
from tvm import s_tir, tirx
from tvm.target import Target

from benchmarks import recording
from benchmarks.recording import markdown_table
from relax_fusion import make_target
from relax_fusion.dlight_rules.apply import rule_name, schedule_by
from relax_fusion.errors import Decline
from relax_fusion.options import make_options
from relax_fusion.pipeline import schedule_kernels
from tests.fuzz.processes import in_processes
from tests.fuzz.rules import RULES
from tests.support.written_weights import written_weights

TARGETS = ("llvm", "h200", "a100", "m1", "mi300x", "iris_xe", "adreno730", "webgpu")
Job = tuple[mlc.Variant, str]
QUANTIZATIONS = ("q0f16", "q4f16_1")


@dataclass
class Row:
    """What became of one model in one quantisation for one target."""

    model: str
    quantization: str
    target: str
    functions: int = 0
    scheduled: dict[str, int] = field(default_factory=dict)
    left: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """By function and rule, why one that could have taken it did not."""
    raised: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    checked: int = 0
    pipeline: bool = False
    """Whether our pipeline, asked to, took the whole module."""
    packed: int = 0
    """Kernels of our pipeline that decode a weight on the way."""
    written: list[str] = field(default_factory=list)
    """Those that write one to memory."""
    not_lowered: str = ""
    """Why MLC-LLM or TVM could not make functions of the model."""


def main() -> None:
    args = arguments()
    try:
        mlc.load(args.mlc_llm)
    except ImportError as err:
        sys.exit(f"check_models: {err}")
    known = mlc.models()
    unknown = sorted(set(args.models or ()) - set(known))
    if unknown:
        sys.exit(f"check_models: no model {unknown[0]!r}; MLC-LLM has {', '.join(known)}")
    variants = [
        mlc.Variant(model, known[model], quantization)
        for quantization in args.quantizations
        for model in args.models or known
        if quantization in mlc.quantizations(model)
    ]
    began, rows = time.time(), []
    jobs = [(variant, target) for variant in variants for target in args.targets]
    work = partial(row_of, check=args.check, pipeline=args.pipeline)
    work = weights_of if args.only_weights else work
    for job, found in in_processes(work, jobs, args.seconds, args.workers):
        rows.append(found if isinstance(found, Row) else empty_row(job, raised=[found]))
        print(line(rows[-1]), flush=True)
    record = recording.facts() | {"mlc_llm": args.commit, "seconds": round(time.time() - began)}
    record["totals"] = totals(rows)
    record["rows"] = [asdict(row) for row in rows]
    if args.output is not None:
        recording.write("check_models", record, report(rows, args.commit), args.output)
    sys.exit(any(row.raised or row.wrong for row in rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mlc-llm", type=Path, required=True, help="a checkout of MLC-LLM")
    parser.add_argument("--commit", default="unknown", help="its commit, for the record")
    parser.add_argument("--models", nargs="+", help="names in mlc_llm.model.MODELS; all of them")
    parser.add_argument("--quantizations", nargs="+", default=QUANTIZATIONS)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--check", action="store_true", help="compile and run what is scheduled")
    parser.add_argument("--pipeline", action="store_true", help="run our pipeline on each module")
    parser.add_argument("--only-weights", action="store_true", help="count decoded weights only")
    parser.add_argument("--workers", type=int, default=1, help="models at the same time")
    parser.add_argument("--seconds", type=int, default=1800, help="limit for one model")
    parser.add_argument("--output", type=Path, help="directory for the results")
    return parser.parse_args()


def empty_row(job: Job, **fields: Any) -> Row:
    variant, target = job
    return Row(variant.model, variant.quantization, target, **fields)


def row_of(job: Job, check: bool, pipeline: bool) -> Row:
    """Return what becomes of the functions of a model for a target."""
    row, target = empty_row(job), make_target(job[1])
    try:
        mod = mlc.lowered(job[0], target)
    except Exception as err:  # of MLC-LLM or TVM: there is nothing to schedule
        row.not_lowered = f"{type(err).__name__}: {last_line(err)}"
        return row
    numbers = Numbers(target) if check else None
    seen: dict[int, str] = {}
    for function, func in mlc.prim_funcs(mod):
        row.functions += 1
        key = tvm_ffi.structural_hash(func.without_attr("global_symbol"))
        if key not in seen:
            seen[key] = scheduled_by(function, func, target, row, numbers)
        if seen[key]:
            row.scheduled[seen[key]] = row.scheduled.get(seen[key], 0) + 1
        else:
            row.left += 1
    if numbers is not None:
        row.checked = numbers.checked
    if pipeline:
        count_weights(job, row)
        with noted(row, "our pipeline"):
            mlc.through_our_pipeline(job[0], target)
            row.pipeline = True
    return row


def weights_of(job: Job) -> Row:
    """Return which weights our pipeline decodes, and how."""
    row = empty_row(job)
    count_weights(job, row)
    return row


def count_weights(job: Job, row: Row) -> None:
    """Note which kernels decode weights, as our pipeline has them where schedules begin."""
    with noted(row, "our pipeline"):
        mod = mlc.through_our_pipeline(job[0], make_target(job[1]), phases=4)
        row.written = written_weights(mod)
        names = [function for function, _ in mlc.prim_funcs(mod)]
        row.functions = row.functions or len(names)
        row.packed = sum("dequantize_" in name for name in names)


def scheduled_by(
    function: str, func: tirx.PrimFunc, target: Target, row: Row, numbers: Numbers | None
) -> str:
    """Try all rules on a function; return the name of the one that schedules it."""
    found: dict[type, bool] = {}
    for rule in RULES:
        what = f"{type(rule).__name__} on {function}"
        with noted(row, what):
            result = rule.attempt(func, target)
            found[type(rule)] = isinstance(result, s_tir.Schedule)
            if isinstance(result, Decline):
                row.refused[what] = str(result)
            elif isinstance(result, s_tir.Schedule) and numbers is not None:
                wrong = numbers.check(func, result.mod["main"])
                row.wrong += [f"{what}: {wrong}"] if wrong else []
    for rule in schedule_kernels(make_options(target, {})).rules:
        if type(rule) not in found:  # TVM's
            with noted(row, f"{rule_name(rule)} on {function}"):
                found[type(rule)] = schedule_by([rule], function, func, target)[0] is not None
        if found.get(type(rule)):
            return rule_name(rule)
    return ""


@contextlib.contextmanager
def noted(row: Row, what: str) -> Iterator[None]:
    """Note what raises."""
    try:
        yield
    except Exception as err:
        row.raised.append(f"{what}: {type(err).__name__}: {last_line(err)}")


def last_line(err: Exception) -> str:
    return (str(err).strip().splitlines() or [""])[-1][:300]


def line(row: Row) -> str:
    """Return a row as one line, and what went wrong below."""
    head = f"{row.model} {row.quantization} {row.target}: "
    if row.not_lowered:
        return head + f"not lowered: {row.not_lowered}"
    by = ", ".join(f"{rule} {n}" for rule, n in sorted(row.scheduled.items()))
    counts = f"{row.functions} functions; {by}; left {row.left}; checked {row.checked}; "
    counts += f"weights packed {row.packed}, written {len(row.written)}"
    problems = [f"  RAISED {r}" for r in row.raised] + [f"  WRONG {w}" for w in row.wrong]
    return "\n".join([head + counts, *problems])


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    scheduled: Counter[str] = Counter()
    for row in rows:
        scheduled.update(row.scheduled)
    return {
        "models": len({row.model for row in rows if row.functions}),
        "modules": sum(bool(row.functions) for row in rows),
        "functions": sum(row.functions for row in rows),
        "scheduled": dict(sorted(scheduled.items())),
        "left": sum(row.left for row in rows),
        "raised": sum(len(row.raised) for row in rows),
        "checked": sum(row.checked for row in rows),
        "wrong": sum(len(row.wrong) for row in rows),
        "through_our_pipeline": sum(row.pipeline for row in rows),
        "packed": sum(row.packed for row in rows),
        "written": sum(len(row.written) for row in rows),
        "not_lowered": sum(bool(row.not_lowered) for row in rows),
    }


def report(rows: Sequence[Row], commit: str) -> str:
    rules = sorted({rule for row in rows for rule in row.scheduled})
    head = ("model", "quantisation", "target", "functions", *rules, "left to TVM", "raised")
    head = (*head, "weights decoded in a kernel", "weights written")
    table = [head]
    for row in rows:
        if row.functions:
            by = [str(row.scheduled.get(rule, "")) for rule in rules]
            cells = (row.model, row.quantization, row.target, str(row.functions))
            ends = (row.left, len(row.raised), row.packed, len(row.written))
            table.append((*cells, *by, *map(str, ends)))
    said = [f"MLC-LLM at {commit}. Totals: {totals(rows)}.", markdown_table(table)]
    missing = [row for row in rows if row.not_lowered]
    if missing:
        said.append("## Not lowered by MLC-LLM and this TVM")
        said.append(
            markdown_table(
                [
                    ("model", "quantisation", "target", "why"),
                    *((r.model, r.quantization, r.target, r.not_lowered) for r in missing),
                ]
            )
        )
    return "\n\n".join(said)


if __name__ == "__main__":
    main()
