"""``relax-fusion compile``: from a model to a directory that can be run or copied."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import save_file

from ..files import write_file
from ..hardware.target import device_of
from ..report import Report
from ..report.record import record_of
from ..transforms.debug_dump import REPORT
from ..validation import json_text, read_json
from .artifact import check_output, place, staged
from .build import build, cuda_kernels, guarded, require_linker
from .console import CliError, Console
from .explain import left_text, summary
from .manifest import (
    LIBRARY,
    PARAMS,
    TOKENIZER,
    Compiled,
    Manifest,
    Weights,
    file_sums,
    parameters,
    signature_of,
    versions,
    write_manifest,
)
from .model_arguments import pipeline_options
from .source import Model, Source, bounds, described, exported_source, facts_of, longest


def compile_command(args: argparse.Namespace, console: Console) -> int:
    """Compile ``args.source`` into the directory ``args.output``."""
    # Everything that can be refused is refused before the slow part begins.
    out = place(args.output)
    check_output(out, force=args.force)
    dump = args.debug_dump
    if dump is not None and out in (place(dump), *place(dump).parents):  # in its own way
        raise CliError(f"--debug-dump {dump} is within -o {out}; choose another", code=2)
    require_linker()
    device = device_of(args.target)
    source, exported = exported_source(args, console, weights=not args.no_weights)
    facts = compile_to(out, source, exported, args, console)
    if args.json:
        console.json(facts)
    else:
        console.result(_text(facts, device.description))
    return 0


def compile_to(
    out: Path, source: Source, exported: Model, args: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """Compile a model that was exported into a directory, and return what is to be told of it."""
    compiled = compiled_of(source, exported, args)
    report = Report()
    report.material.model = f"{source.name}, {described(exported)}"
    report.material.most = longest(exported)
    with staged(out, force=args.force) as stage:
        _write_weights(source, exported, compiled.weights, stage, console)
        start = time.perf_counter()
        kernels, sources = _write_library(exported, compiled, stage, report, args, console)
        seconds = time.perf_counter() - start
        console.step(f"writing {REPORT}")
        facts = facts_of(source.name, exported, args)
        record = {**record_of(report, sources=True), **facts}
        write_file(stage / REPORT, json_text(record) + "\n")
        console.step("writing the manifest")
        files = file_sums(stage)
        manifest = Manifest(**vars(compiled), parameters=parameters(exported), files=files)
        write_manifest(stage, manifest)
    return {
        "output": args.output,
        "source": source.name,
        "target": str(args.target),
        "dtype": exported.dtype,
        "quantization": compiled.quantization,
        "shards": compiled.shards,
        "max_seq_len": compiled.max_seq_len,
        "weights": compiled.weights,
        "compile_s": round(seconds, 3),
        "cuda_kernels": kernels,
        "cuda_sources": sources,
        "files": {name: asdict(file) for name, file in manifest.files.items()},
        **summary(report),
    }


def _write_weights(
    source: Source, exported: Model, weights: Weights, stage: Path, console: Console
) -> None:
    """Copy what `run` needs besides the library."""
    if source.tokenizer is not None:
        shutil.copyfile(source.tokenizer, stage / TOKENIZER)
    if weights != "file":
        return
    console.step("reading the weights")
    arrays = source.weights(exported)
    file = stage / PARAMS
    file.touch()
    mode = file.stat().st_mode  # what the umask says; safetensors lets nobody else read its files
    try:
        save_file(dict(arrays), file)
    except SafetensorError as err:
        raise CliError(f"{PARAMS} cannot be written: {err}") from err
    file.chmod(mode)


def _write_library(
    exported: Model,
    compiled: Compiled,
    stage: Path,
    report: Report,
    args: argparse.Namespace,
    console: Console,
) -> tuple[int, int]:
    """Compile and link; return the number of CUDA kernels, and of those that are source."""
    known = bounds(exported)
    executable = build(
        exported,
        args.target,
        report=report,
        metadata=compiled.to_metadata(),
        **pipeline_options(args),
        progress=console.step,
        **({"variable_bounds": known} if known else {}),
    )
    console.step(f"linking {LIBRARY}")
    guarded(lambda: executable.export_library(str(stage / LIBRARY)), args.target)
    return len(cuda_kernels(executable)), len(cuda_kernels(executable, ("cuda",)))


def compiled_of(source: Source, exported: Model, args: argparse.Namespace) -> Compiled:
    """Describe what will be compiled.

    Raises `CliError` if `run` could not read it from a manifest, which takes less than
    ``config.json`` may hold.
    """
    kept = source.kept(exported)
    compiled = Compiled(
        source=source.name,
        dtype=exported.dtype,
        target=str(args.target),
        functions=exported.functions,
        versions=versions(),
        signature=signature_of(exported),
        **{**kept, "weights": "none" if args.no_weights else kept["weights"]},
    )
    where = f"the config of {source.name} cannot be kept"
    try:
        read_json(Compiled, json.dumps(asdict(compiled)), CliError, where)
    except RecursionError as err:
        raise CliError(f"{where}: it is nested too deep") from err
    return compiled


def _text(facts: dict[str, Any], device: str) -> str:
    fused = ", ".join(f"{count} by {name}" for name, count in facts["fused"].items()) or "nothing"
    stored = facts["quantization"] or facts["dtype"]
    spread = f", {facts['shards']} workers" if facts["shards"] > 1 else ""
    lines = [
        f"{facts['output']}: {facts['source']}, {stored}, for {device}{spread}, compiled in "
        f"{facts['compile_s']:.1f} s",
        f"  fused     {fused}; {left_text(facts['left'])}",
    ]
    if facts["cuda_kernels"]:
        sources = facts["cuda_sources"]
        later = f"; TVM compiles {sources} of them, with NVRTC, when it loads the library"
        lines.append(f"  CUDA      {facts['cuda_kernels']} kernels{later if sources else ''}")
    weights = {
        "file": "in the directory",
        "random": "none: `run` makes random ones",
        "none": "none (--no-weights)",
    }
    lines.append(f"  weights   {weights[facts['weights']]}")
    for name, entry in facts["files"].items():
        lines.append(f"  {entry['bytes'] / 1e6:9.2f} MB  {name}")
    return "\n".join(lines)
