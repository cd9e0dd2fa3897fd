"""Compile MLC-LLM's models by its own entry point, with our pipeline installed.

    python scripts/check_mlc.py --mlc-llm PATH [--models llama gpt2] [--targets llvm h200]

Each model keeps its own widths and has two layers.  ``mlc_llm.interface.compile.compile`` runs to
its end: exporting, quantising, our pipeline, TVM's code generators, the library, the report of
memory.  LLVM does not optimise, which would take most of the time.  No weights and no GPU are
needed.  For CUDA the library holds sources, which TVM compiles when it is loaded, and Triton's
kernels as machine code.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import _mlc_llm as mlc
import tvm

from benchmarks import recording
from benchmarks.recording import markdown_table
from relax_fusion import Report, make_target
from relax_fusion.mlc import install
from tests.fuzz.processes import in_processes
from tests.support.quick import quick

PRESETS = {
    "llama": "llama3_1_8b",
    "gpt2": "gpt2",
    "qwen2": "qwen2_7b",
    "gemma2": "gemma2_2b",
    "phi3": "phi-3_5",
    "mixtral": "Mixtral-8x7B-v0.1",
}
CHANGED = {"phi3": {"rope_scaling": None}}
"""Fields without which MLC-LLM's own front end takes a preset."""


@dataclass(frozen=True)
class Job:
    """A model to be compiled."""

    model: str
    quantization: str
    target: str
    optimization: str
    no_library: bool = False
    """Whether to stop behind our pipeline."""

    @property
    def name(self) -> str:
        return f"{self.model} {self.quantization} {self.target} {self.optimization}"


@dataclass
class Row:
    """What became of it."""

    job: Job
    seconds: float = 0.0
    megabytes: float = 0.0
    """Of the library."""
    launches: dict[str, int] = field(default_factory=dict)
    """By function: of embedding's result, all layers, the last norm and lm_head."""
    failed: str = ""


def main() -> None:
    args = arguments()
    try:
        mlc.load(args.mlc_llm)
    except ImportError as err:
        sys.exit(f"check_mlc: {err}")
    jobs = [
        Job(model, quantization, target, optimization, args.no_library)
        for target in args.targets
        for optimization in args.optimizations
        for model in args.models
        for quantization in args.quantizations
    ]
    rows: list[Row] = []
    for job, found in in_processes(row_of, jobs, args.seconds, args.workers):
        rows.append(found if isinstance(found, Row) else Row(job, failed=found))
        print(line(rows[-1]), flush=True)
    if args.output is not None:
        record = recording.facts() | {"mlc_llm": args.commit}
        record["rows"] = [asdict(row) for row in rows]
        recording.write("mlc_compile", record, report(rows, args.commit), args.output)
    sys.exit(any(row.failed for row in rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mlc-llm", type=Path, required=True, help="a checkout of MLC-LLM")
    parser.add_argument("--commit", default="unknown", help="its commit, for the record")
    parser.add_argument("--models", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--quantizations", nargs="+", default=["q0f16", "q4f16_1"])
    parser.add_argument("--targets", nargs="+", default=["llvm", "h200"])
    parser.add_argument("--optimizations", nargs="+", default=["O0", "O2", "O3"])
    parser.add_argument("--no-library", action="store_true", help="stop behind our pipeline")
    parser.add_argument("--workers", type=int, default=1, help="models at the same time")
    parser.add_argument("--seconds", type=int, default=900, help="limit for one model")
    parser.add_argument("--output", type=Path, help="directory for the results")
    return parser.parse_args()


def row_of(job: Job) -> Row:
    """Compile a model as MLC-LLM's command line does."""
    row, report, began = Row(job), Report(), time.monotonic()
    install(report=report)
    metadata: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "lib.so"
        compile_by_mlc(job, library, metadata)
        row.megabytes = 0.0 if job.no_library else round(library.stat().st_size / 1e6, 2)
    row.seconds = round(time.monotonic() - began, 1)
    missing = {"memory_usage", "kv_cache", "params"} - {k for k, v in metadata.items() if v}
    if missing:
        row.failed = f"the metadata lack {', '.join(sorted(missing))}"
    row.launches = {
        run.function: len(run.kernels)
        for run in report.launches
        if run.function in ("decode", "batch_decode", "batch_prefill")
    }
    return row


def compile_by_mlc(job: Job, library: Path, found: dict[str, Any]) -> None:
    """Run MLC-LLM's compiler; `found` gets the metadata that its engine will read."""
    from mlc_llm.interface import compile as compiler
    from mlc_llm.interface.compiler_flags import ModelConfigOverride, OptimizationFlags
    from mlc_llm.model import MODELS
    from mlc_llm.quantization import QUANTIZATION

    def build(mod: tvm.IRModule, args: Any, pipeline: Any) -> None:
        if job.no_library:
            with args.target:
                pipeline(mod)
        else:
            tvm.compile(mod, args.target, relax_pipeline=pipeline).export_library(str(args.output))

    def report_memory(metadata: dict[str, Any], config: Any) -> None:
        found.update(metadata)
        said(metadata=metadata, config=config)

    variant = mlc.Variant(job.model, PRESETS[job.model], job.quantization)
    said, compiler._report_memory_usage = compiler._report_memory_usage, report_memory
    compiler.compile(
        config=mlc.fields_of(variant) | CHANGED.get(job.model, {}),
        quantization=QUANTIZATION[job.quantization],
        model_type=MODELS[job.model],
        target=quick(make_target(job.target)),
        opt=OptimizationFlags.from_str(job.optimization),
        build_func=build,
        system_lib_prefix="",
        output=library,
        overrides=ModelConfigOverride(max_batch_size=8),
    )


def line(row: Row) -> str:
    if row.failed:
        return f"{row.job.name}: FAILED {row.failed.strip().splitlines()[-1][:300]}"
    launches = ", ".join(f"{name} {count}" for name, count in sorted(row.launches.items()))
    return f"{row.job.name}: {row.seconds} s, {row.megabytes} MB; launches: {launches}"


def report(rows: Sequence[Row], commit: str) -> str:
    functions = sorted({name for row in rows for name in row.launches})
    head = ("model", "quantisation", "target", "opt", "seconds", "library MB")
    table = [(*head, *(f"launches of {name}" for name in functions))]
    for row in rows:
        job, ended = row.job, not row.failed
        table.append(
            (
                *(job.model, job.quantization, job.target, job.optimization),
                f"{row.seconds:g}" if ended else "failed",
                f"{row.megabytes:g}" if row.megabytes else "",
                *(str(row.launches.get(name, "")) for name in functions),
            )
        )
    done = sum(not row.failed for row in rows)
    said = [
        f"MLC-LLM at {commit}: `interface.compile.compile()` with `relax_fusion.mlc.install()`; "
        f"two layers of each model's own widths. {done} of {len(rows)} ran to the end; "
        "those without a library were stopped behind our pipeline, before TVM's code generators. "
        "Launches are those of both layers, the last norm and lm_head. Libraries for CUDA hold "
        "TVM's kernels as sources; LLVM did not optimise. Seconds are of a busy machine. Libraries "
        "that an option stands for were used where they are installed.",
        markdown_table(table),
    ]
    said += [line(row) for row in rows if row.failed]
    return "\n\n".join(said)


if __name__ == "__main__":
    main()
