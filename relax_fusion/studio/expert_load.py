"""``relax-fusion workloads --record``: how many rows a run gives to each expert."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..cli.artifact import check_written, write_page
from ..cli.console import CliError, Console
from ..cli.manifest import Manifest, read_manifest
from ..cli.run import check_runnable, generated
from ..hardware.target import device_of, is_cpu, make_target
from ..models import Generator, ParallelGenerator
from ..report.tables import Table
from ..validation import json_text
from ..workload import ExpertMatmul
from ..workload.expert_load import ExpertLoad
from .compilation import is_compiled, read_compilation

_PREFIX = "fuse_experts_"
"""Of the names of kernels of experts, in front of the key of their workload."""


class _Counter:
    """Counts rows by expert, as the virtual machine calls kernels of experts.

    `firsts`: the kernels that multiply the rows of tokens, of each layer of a prompt.
    `others`: those of the other functions, of which each has as many layers.
    """

    def __init__(self, firsts: Sequence[ExpertMatmul], others: Sequence[ExpertMatmul]) -> None:
        self.works = {work.key: work for work in (*firsts, *others)}
        self.counts = np.zeros((len(firsts), firsts[0].experts), "int64")
        self.calls = 0

    def watch(self, generator: Generator | ParallelGenerator) -> None:
        """Have the machine of a generator call this object in front of all that it calls."""
        assert isinstance(generator, Generator), "experts are not spread over workers"
        generator.machine.set_instrument(self)

    def __call__(self, _: Any, name: str, before: bool, __: Any, *args: Any) -> int:
        """Count the numbers of experts that a kernel is about to read; 0: go on."""
        work = self.works.get(name.removeprefix(_PREFIX)[:8]) if before else None
        if work is not None:
            at = [operand.name for operand in work.graph.inputs].index("ids")
            ids = args[at].numpy().reshape(-1).clip(0, work.experts - 1)
            layer = self.counts[self.calls % len(self.counts)]
            layer += np.bincount(ids, minlength=work.experts)
            self.calls += 1
        return 0


def record_load(args: argparse.Namespace, console: Console) -> int:
    """Run ``args.source`` on a prompt; write and print how many rows each expert had."""
    if args.csv is not None or args.json is not None or args.on:
        raise CliError("--record takes no --csv, --json or --on; run them apart", code=2)
    check_written({"--record": args.record}, args.source)
    manifest = _runnable(args)
    firsts, others = list[ExpertMatmul](), list[ExpertMatmul]()
    for made in read_compilation(args.source).report.fused:
        work = made.workload
        if isinstance(work, ExpertMatmul) and not work.each and not work.share:
            (firsts if made.function == "prefill" else others).append(work)
    kinds = {(work.experts, work.chosen) for work in firsts}
    if len(kinds) != 1 or len(others) != len(firsts):
        told = "has no layers of experts that are all alike"
        raise CliError(f"--record: {args.source} {told}", code=2)
    counter = _Counter(firsts, others)
    generated(args.source, manifest, args, console, counter.watch)
    load = ExpertLoad(firsts[0].chosen, tuple(tuple(map(int, row)) for row in counter.counts))
    write_page(json_text(load) + "\n", args.record, console)
    console.result(_text(load))
    return 0


def _runnable(args: argparse.Namespace) -> Manifest:
    """Return the manifest of a decoder that runs on a CPU, and is given a prompt."""
    if not is_compiled(Path(args.source)):
        told = "--record runs a directory that `relax-fusion compile` made"
        raise CliError(f"{told}; {args.source} is not one", code=2)
    manifest = read_manifest(Path(args.source))
    target = make_target(manifest.target)
    if not is_cpu(target) or "decode" not in manifest.functions:
        told = "--record runs decoders that were compiled for a CPU"
        made = f"{manifest.source}, for {device_of(target).description}"
        raise CliError(f"{told}; {args.source} is {made}", code=2)
    if args.prompt is None and args.prompt_ids is None:
        raise CliError("--record needs --prompt or --prompt-ids", code=2)
    check_runnable(args.source, manifest, args)
    return manifest


def _text(load: ExpertLoad) -> str:
    """Return a table with what is uneven in each layer."""
    head = ("layer", "rows", "experts with rows", "most of one expert", "a tenth of experts has")
    rows: list[tuple[str, ...]] = [head]
    for number, counts in enumerate(load.counts):
        pairs, few = sum(counts), max(1, load.experts // 10)
        tenth = sum(sorted(counts)[-few:]) / pairs
        had = sum(n > 0 for n in counts)
        each = (pairs // load.chosen, f"{had} of {load.experts}", max(counts), f"{tenth:.0%}")
        rows.append((str(number), *map(str, each)))
    title = f"Rows by expert, {load.chosen} each; skew {load.skew:g}"
    return Table(title, rows).text()
