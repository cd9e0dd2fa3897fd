"""Compare what TVM's own pipeline and this library's compute of some hundreds of small models.

    nice python scripts/compare_models.py [MODEL ...] [--out FILE] [--jobs 2]

Models are ``.onnx`` and ``.pt2`` files, and small ones of transformers with random weights,
exported to either with eager attention or PyTorch's own, static or dynamic shapes, float32 or
float16: by default all of these.  A process for each compiles it for this machine by both and
compares results, with PyTorch's where it is its model.  FILE.json and FILE.md say what came of
each; a second run adds to them.  Needs torch, transformers, onnx and onnxscript, and hours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx
from tvm.relax.frontend.torch import from_exported_program

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import relax_fusion
from relax_fusion.frontends import read_model
from scripts._small_models import examples_of, exported, inputs_of, models

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
SECONDS = 120
"""Of a processor, for one model."""

WARM = "gpt2/AutoModelForCausalLM/eager/static/float32/onnx"

ALLOWED = {"float16": 2e-2, "float32": 2e-4}
"""What ours may be worse than twice TVM's error, relative to the largest number: sums have another
order, and weights are random."""


def theirs(path: Path) -> tuple[tvm.IRModule, list[np.ndarray]]:
    """Import a file as TVM does."""
    if path.suffix == ".onnx":
        return from_onnx(onnx.load(path)), []
    return from_exported_program(torch.export.load(path)), []


def ours(path: Path) -> tuple[tvm.IRModule, list[np.ndarray]]:
    """Import a file as the library does."""
    read = read_model(path)
    return read.mod, list(read.weights.values())


BUILDS = {"tvm": (theirs, tvm.compile), "ours": (ours, relax_fusion.build)}


def computed(who: str, path: Path, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return what a model computes as one of `BUILDS`."""
    read, build = BUILDS[who]
    mod, weights = read(path)
    run = relax.VirtualMachine(build(mod, "llvm"), tvm.cpu())["main"]
    got = run(*(tvm.runtime.tensor(a) for a in (*inputs, *weights)))
    return [t.numpy() for t in ([got] if isinstance(got, tvm.runtime.Tensor) else got)]


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest error, relative to the largest number; infinity if they differ in kind."""
    got, wanted = got.astype("float64"), wanted.astype("float64")
    if got.shape != wanted.shape or (np.isfinite(got) != np.isfinite(wanted)).any():
        return float("inf")
    got, wanted = np.nan_to_num(got), np.nan_to_num(wanted)
    return float(np.abs(got - wanted).max(initial=0) / max(np.abs(wanted).max(initial=0), 1e-30))


def compare(tag: str, say: Callable[..., None]) -> None:
    """Say what comes of one model: of each build an error or what was raised."""
    with tempfile.TemporaryDirectory() as folder:
        reference = None
        try:
            if tag.endswith(".onnx"):
                path, inputs = Path(tag), inputs_of(Path(tag))
            elif tag.endswith(".pt2"):
                path, (inputs, reference) = Path(tag), examples_of(Path(tag))
            else:
                path, given, wanted = exported(tag, Path(folder))
                inputs, reference = [given], [wanted]
        except Exception as err:  # of exporters, with no common class
            say(export=shown(err))
            return
        for who in BUILDS:
            say(**{who: "not finished"})
            begun = time.process_time()
            try:
                got = computed(who, path, inputs)
                reference = got if reference is None else reference
                found: Any = max(map(error, got, reference), default=0.0)
            except Exception as err:  # of importers and compilers, with no common class
                found = shown(err)
            say(**{who: found, f"{who}_s": round(time.process_time() - begun, 1)})


def shown(err: Exception) -> str:
    """Return the class of an error and its last line."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()] or [""]
    return f"{type(err).__name__}: {re.sub(r'/[^ ]*/', '', lines[-1])[:160]}"


def verdict(tag: str, said: dict[str, Any]) -> str:
    """Return what a comparison comes to."""
    if "export" in said:
        return "not exported"
    default, own = said.get("tvm"), said.get("ours")
    if not isinstance(own, float):
        return "only TVM" if isinstance(default, float) else "neither"
    known = default if isinstance(default, float) and np.isfinite(default) else 0.0
    close = own <= 2 * known + ALLOWED["float16" if "float16" in tag else "float32"]
    return ("both, " if isinstance(default, float) else "only ours, ") + (
        "same numbers" if close else "other numbers"
    )


def start(tag: str, path: Path) -> int:
    """Begin to compare a model in a process of its own, which writes to a file."""
    process = os.fork()
    if process:
        return process
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    said: dict[str, Any] = {}
    compare(tag, lambda **new: (said.update(new), path.write_text(json.dumps(said))))
    os._exit(0)


def write(file: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write the results, and a table of them."""
    file.with_suffix(".json").write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    found = {tag: verdict(tag, said) for tag, said in sorted(results.items())}
    counts = ", ".join(f"{n} {what}" for what, n in Counter(found.values()).most_common())
    lines = [
        f"{len(results)} models: {counts}.",
        "",
        "| model | came to | TVM | ours |",
        "|---|---|---|---|",
    ]
    for tag, what in found.items():
        cells = [results[tag].get(k, "") for k in ("tvm", "ours")]
        cells = [f"{c:.1e}" if isinstance(c, float) else str(c).replace("|", " ") for c in cells]
        cells[0] = results[tag].get("export", cells[0])
        lines.append(f"| {tag} | {what} | {cells[0]} | {cells[1]} |")
    file.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="files, or parts of names")
    parser.add_argument("--out", type=Path, default=RESULTS / "compare_models")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    file = args.out.with_suffix(".json")
    results = json.loads(file.read_text()) if file.exists() else {}
    files = [name for name in args.models if name.endswith((".onnx", ".pt2"))]
    parts = [name for name in args.models if name not in files]
    tags = [t for t in models() if any(p in t for p in parts) or not args.models]
    left = [tag for tag in (*files, *tags) if tag not in results]
    with tempfile.TemporaryDirectory() as folder:
        exported(WARM, Path(folder))  # imports, once for all processes
        running: dict[int, tuple[str, Path]] = {}
        while left or running:
            while left and len(running) < args.jobs:
                tag, path = left.pop(0), Path(folder) / f"{len(left)}.json"
                path.write_text("{}")
                running[start(tag, path)] = tag, path
            process, status = os.wait()
            tag, path = running.pop(process)
            results[tag] = json.loads(path.read_text())
            if os.WIFSIGNALED(status):
                end = f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
                own = {k: end for k, v in results[tag].items() if v == "not finished"}
                results[tag] |= own or {"export": end}
            print(f"{tag}: {verdict(tag, results[tag])} {results[tag]}", flush=True)
            write(args.out, results)


if __name__ == "__main__":
    main()
