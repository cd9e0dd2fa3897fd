"""``relax-fusion compile``: from a model to a directory that can be run or copied."""

from __future__ import annotations

import argparse
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from ..models import ExportedModel, load_weights
from ..report import Report
from ..target import device_of
from .artifact import (
    LIBRARY,
    PARAMS,
    TOKENIZER,
    Manifest,
    check_output,
    file_sums,
    parameters,
    staged,
    versions,
    write_manifest,
)
from .build import build, cuda_kernels, guarded, require_linker
from .console import Console
from .explain import summary
from .source import Source, export_for, open_source


def compile_command(args: argparse.Namespace, console: Console) -> int:
    """Compile ``args.source`` into the directory ``args.output``."""
    # Everything that can be refused is refused before the slow part begins.
    out = Path(args.output)
    check_output(out, force=args.force)
    require_linker()
    device = device_of(args.target)
    source = open_source(args.source)
    if not args.no_weights:
        source.require_weights()
    console.step(f"exporting {source.name}")
    exported = export_for(source.config, args.target, args.dtype, args.max_seq_len, args.batch)
    report = Report()
    with staged(out) as stage:
        weights = _write_weights(source, exported, stage, args, console)
        start = time.perf_counter()
        kernels = _write_library(exported, stage, report, args, console)
        seconds = time.perf_counter() - start
        console.step("writing the manifest")
        manifest = _manifest(source, exported, weights, stage, str(args.target))
        write_manifest(stage, manifest)
    facts = {
        "output": str(out),
        "source": source.name,
        "target": str(args.target),
        "dtype": exported.dtype,
        "max_seq_len": exported.max_seq_len,
        "weights": weights,
        "compile_s": round(seconds, 3),
        "cuda_kernels": kernels,
        "files": manifest.files,
        **summary(report),
    }
    if args.json:
        console.json(facts)
    else:
        console.result(_text(facts, device.label))
    return 0


def _write_weights(
    source: Source,
    exported: ExportedModel,
    stage: Path,
    args: argparse.Namespace,
    console: Console,
) -> str:
    """Copy what `run` needs besides the library; return where the weights will come from."""
    if source.tokenizer is not None:
        shutil.copyfile(source.tokenizer, stage / TOKENIZER)
    if args.no_weights:
        return "none"
    if source.directory is None:
        return "random"
    console.step("reading the weights")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arrays = load_weights(source.directory, exported)
    for warning in caught:
        console.warn(str(warning.message))
    names = [param.name for param in exported.params]
    save_file(dict(zip(names, arrays, strict=True)), stage / PARAMS)
    return "file"


def _write_library(
    exported: ExportedModel,
    stage: Path,
    report: Report,
    args: argparse.Namespace,
    console: Console,
) -> int:
    """Compile and link; return the number of CUDA kernels."""
    executable = build(
        exported,
        args.target,
        report=report,
        backend=args.backend,
        disable=args.disable,
        always_fuse=args.always_fuse,
        allow_tf32=args.allow_tf32,
        use_cuda_graph=not args.no_cuda_graph,
        debug_dump=args.debug_dump,
        progress=console.step,
    )
    console.step(f"linking {LIBRARY}")
    guarded(lambda: executable.export_library(str(stage / LIBRARY)), args.target)
    return len(cuda_kernels(executable))


def _manifest(
    source: Source, exported: ExportedModel, weights: str, stage: Path, target: str
) -> Manifest:
    assert isinstance(exported.batch, int), "the command line gives a number"
    return Manifest(
        source=source.name,
        config=dict(source.data),
        dtype=exported.dtype,
        max_seq_len=exported.max_seq_len,
        batch=exported.batch,
        target=target,
        functions=list(exported.functions),
        parameters=parameters(exported),
        weights=weights,
        versions=versions(),
        files=file_sums(stage),
    )


def _text(facts: dict[str, Any], device: str) -> str:
    fused = ", ".join(f"{count} by {name}" for name, count in facts["fused"].items()) or "nothing"
    lines = [
        f"{facts['output']}: {facts['source']}, {facts['dtype']}, for {device}, compiled in "
        f"{facts['compile_s']:.1f} s",
        f"  fused     {fused}; {facts['declined']} chains left to TVM",
    ]
    if facts["cuda_kernels"]:
        lines.append(
            f"  CUDA      {facts['cuda_kernels']} kernels as source, compiled when the library is "
            "loaded on the GPU machine"
        )
    weights = {
        "file": "in the directory",
        "random": "none: `run` makes random ones",
        "none": "none (--no-weights)",
    }
    lines.append(f"  weights   {weights[facts['weights']]}")
    for name, entry in facts["files"].items():
        lines.append(f"  {entry['bytes'] / 1e6:9.2f} MB  {name}")
    return "\n".join(lines)
