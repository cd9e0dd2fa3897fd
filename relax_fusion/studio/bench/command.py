"""``relax-fusion bench``: time a compiled model, its kernels, and the same model elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ...cli.argument_types import PEERS
from ...cli.artifact import check_written, when_interrupted
from ...cli.build import device_for, device_here, require_linker
from ...cli.compile import compile_to, compiled_of
from ...cli.console import CliError, Console, first_line
from ...cli.manifest import Compiled, check_files, read_manifest
from ...cli.source import Source, exported_source
from ...errors import RelaxFusionError
from ...files import write_file
from ...frontends import ImportedModel
from ...hardware.target import device_of, make_target
from ...models.threads import thread_count, use_all_cores
from ...report import Report
from ...report.costs import planned
from ...report.sizes import sizes_text
from ...timing import KernelTime, in_turn, kernel_times
from ...transforms.whole_graph import RUN_OR_CAPTURE
from ...validation import json_text
from ..compilation import check_unasked, is_compiled
from ..measure import Turn
from ..report_page import report_html
from ..workload_tables import product_text
from .contenders import OURS, TORCH, TVM, Contender, installed, ours, tvm_default
from .results import Results
from .subject import Subject, sizes_of
from .torch_peers import MODES, TorchPeers


def bench_command(args: argparse.Namespace, console: Console) -> int:
    """Measure what a directory holds, or what a model is compiled to."""
    use_all_cores()  # before TVM has made its threads
    files = {"--json": args.json, "--html": args.html}
    check_written(files, args.source, args.database, stdout=("--json",))
    with tempfile.TemporaryDirectory(prefix="relax-fusion-bench-") as folder:
        load = console.load()
        results = Results(_subject(args, Path(folder), console), load)
        if args.html is not None or not args.no_kernels:
            results.subject.compilation.fact("source")  # a damaged report is told at once
        with _partly(results, args, console):
            _measure(results, args, console)
        with results.told:
            _tell(results, args, console)
    return 0 if results.agrees else 1


def _subject(args: argparse.Namespace, folder: Path, console: Console) -> Subject:
    """Return what is measured; a model is compiled first."""
    source, model = None, None
    directory = Path(args.source)
    if is_compiled(directory):
        manifest = read_manifest(directory)
        check_unasked(args, manifest.target)
    else:
        directory = folder / "out"
        source, model = _compile(args, directory, console)
        manifest = read_manifest(directory)
    sizes = _sizes(manifest, args)
    check_files(directory, manifest)
    device = device_for(directory, manifest, console)
    if args.device:
        device = device_here(make_target(manifest.target), args.device)
    imported = model if isinstance(model, ImportedModel) else None
    return Subject(directory, manifest, device, sizes, source, imported)


def _spread(manifest: Compiled, args: argparse.Namespace) -> None:
    """Leave out what is measured on one worker alone, and refuse to be asked for it."""
    where = f"{manifest.source} is spread over {manifest.shards} workers"
    if args.device:
        raise CliError(f"--device {args.device}: {where}, each of which has a device", code=2)
    if args.against:
        raise CliError(f"--against {','.join(args.against)}: {where}, and peers run on one", code=2)
    args.against, args.no_kernels = [], True


def _sizes(compiled: Compiled, args: argparse.Namespace) -> dict[str, int]:
    if compiled.shards > 1:
        _spread(compiled, args)
    return sizes_of(compiled, args.prompt, args.new_tokens, dict(args.size))


def _compile(args: argparse.Namespace, out: Path, console: Console) -> tuple[Source, Any]:
    """Compile a model as `compile` does, into a directory that does not stay."""
    require_linker()
    device_here(args.target, args.device)
    source, model = exported_source(args, console, weights=True)
    own = argparse.Namespace(**vars(args), output=out)
    _sizes(compiled_of(source, model, own), args)
    console.step(f"compiling {source.name}")
    compile_to(out, source, model, own, console)
    return source, model


def _measure(results: Results, args: argparse.Namespace, console: Console) -> None:
    """Make those ready who are measured, let them take turns, then look at single kernels."""
    subject = results.subject
    console.step(f"{OURS}: loading the library and the weights")
    results.contenders[OURS] = ours(subject)
    for who, make in _peers(subject, args).items():
        console.step(f"{who}: getting ready")
        try:
            results.contenders[who] = make()
        except Exception as err:  # of other libraries; the output says what failed
            results.failed[who] = first_line(err) if not isinstance(err, CliError) else str(err)
    subject.forget_weights()
    if subject.device.type == "cpu":
        _choose_threads(results, args, console)
    _take_turns(results, args, console)
    for step in [] if args.no_kernels else results.steps:
        _show(results, args, console)
        console.step(f"timing the kernels of {step}")
        results.contenders[OURS].set_threads()
        results.kernels[step] = measure_kernels(subject, results.contenders[OURS], step)


def _peers(subject: Subject, args: argparse.Namespace) -> dict[str, Callable[[], Contender]]:
    """Return what makes the peers that were asked for."""
    by_torch = TorchPeers(subject)
    makers: dict[str, Callable[[], Contender]] = {
        TVM: lambda: tvm_default(subject),
        TORCH: by_torch.eager,
    }
    makers |= {who: partial(by_torch.compiled, who) for who in MODES}
    wanted = installed(subject.device.type) if args.against is None else args.against
    return {who: makers[who] for who in PEERS if who in wanted}


def _choose_threads(results: Results, args: argparse.Namespace, console: Console) -> None:
    """Give everybody the threads that were asked for, or those with which a turn is shorter."""
    most = thread_count()
    if args.threads is not None and args.threads > most:
        raise CliError(f"--threads {args.threads}: TVM has {most} here", code=2)
    if most == 1:
        return  # TVM would keep the whole process to one processor
    for who, contender in results.contenders.items():
        contender.threads = args.threads or most
        if args.threads is not None:
            continue
        console.step(f"{who}: choosing between 1 and {most} threads")
        taken: dict[int, float] = {}
        for count in (most, 1, most):  # the first turn warms up
            contender.threads = count
            try:
                (turn,) = contender.turn()
            except Exception as err:  # of other libraries
                if who == OURS:
                    raise
                results.failed[who] = first_line(err)
                break
            taken[count] = sum(map(sum, turn.values()))
            if sum(taken.values()) > args.seconds / len(results.contenders):
                break
        contender.threads = min(taken, key=taken.__getitem__, default=most)
    results.drop_failed()


def _take_turns(results: Results, args: argparse.Namespace, console: Console) -> None:
    """Time everybody in turn; the first turn of each warms up."""
    spent, told = dict.fromkeys(results.contenders, 0.0), 0.0

    def timer(who: str, number: int) -> list[Turn]:
        nonlocal told
        began = time.perf_counter()
        if number == 0 or began - told > 1:  # turns of milliseconds need no line each
            told = began
            console.step(f"{who}: {f'turn {number} of {args.repeat}' if number else 'warming up'}")
        try:
            return results.contenders[who].turn()
        except Exception as err:  # of other libraries, again
            if who == OURS:
                raise
            results.failed[who] = first_line(err)
            return []
        finally:
            spent[who] += time.perf_counter() - began

    def again(who: str, _: object) -> bool:
        return who not in results.failed and spent[who] < args.seconds / len(spent)

    in_turn({who: partial(timer, who) for who in spent}, args.repeat + 1, again, results.turns)
    results.drop_failed()


@contextlib.contextmanager
def _partly(results: Results, args: argparse.Namespace, console: Console) -> Iterator[None]:
    """Tell what was measured so far where the process is asked to end."""

    def tell() -> None:
        if results.told.acquire(blocking=False) and results.turns.get(OURS):
            results.is_interrupted = True
            _tell(results, args, console)

    with when_interrupted(tell):
        try:
            yield
        except KeyboardInterrupt:  # where nobody watches over the process
            tell()
            raise


def _show(results: Results, args: argparse.Namespace, console: Console) -> None:
    """Print what was measured and not printed yet."""
    if args.json != "-" and (text := results.news()):
        console.result(text + "\n")


def _tell(results: Results, args: argparse.Namespace, console: Console) -> None:
    """Print what was measured, then write the files, which may fail."""
    record = results.to_record()
    if args.json == "-":
        console.result(json_text(record))
    _show(results, args, console)
    if args.json not in (None, "-"):
        write_file(Path(args.json), json_text(record) + "\n")
    if args.html is not None:
        write_file(Path(args.html), report_html(results.subject.compilation.report, record))


REPEATS = 5
"""The kernels of a function are timed in this many calls."""


def measure_kernels(subject: Subject, contender: Contender, step: str) -> list[dict[str, Any]]:
    """Time the kernels of one step, and predict those that we made.

    Returns what JSON holds of each: its times, how often a call runs it, the chain that it fuses,
    the sizes of its matmuls, the tiles that serve them, and what is predicted of one run, on a GPU
    without the launch, which is not in the times either.
    """
    machine = contender.runs.machine
    times = kernel_times(machine, _call(subject, contender, step), subject.device, REPEATS)
    return [_beside(subject, subject.compilation.report, step, time) for time in times]


def _call(subject: Subject, contender: Contender, step: str) -> Callable[[], Any]:
    """Return what calls the function of a step, always at the same position."""
    runs = contender.runs
    if not subject.is_decoder:
        return lambda: runs()
    ids, prompt = subject.ids(), subject.sizes["prompt"]
    rows = [ids[:prompt]] * subject.batch

    def prefill() -> None:
        runs.reset()
        runs.prefill(rows)

    def decode() -> None:
        runs.length = prompt  # whose rows the caches have from the turns before
        runs.decode([ids[prompt - 1]] * subject.batch)

    return prefill if step == "prefill" else decode


def _beside(subject: Subject, report: Report, step: str, time: KernelTime) -> dict[str, Any]:
    sizes = subject.calls()[step]
    own = {
        "kernel": time.name,
        "chain": "kernels of a CUDA graph" if time.name == RUN_OR_CAPTURE else "",
        "launches": time.count,
        **time.times.to_record(),
        "predicted_s": None,
        "plan": "",
        "size": sizes_text(sizes) or "static",
        "resolution_s": time.resolution,
    }
    item = next((i for i in report.work_of(step) if i.kernel == time.name), None)
    plans = next((d.plans for d in report.decisions if d.kernel == time.name), None)
    if item is None or item.work is None or plans is None:
        return own
    own |= {"chain": item.chain, "size": product_text(item, [sizes])}
    try:
        device = device_of(make_target(subject.manifest.target))
        prediction, plan = planned(item, item.work, plans, sizes, device)
    except RelaxFusionError:  # a family that is not registered here, say
        return own
    launch_s = device.launch_s if device.kind == "gpu" else 0.0  # which times have not
    seconds = None if prediction is None else prediction.seconds - launch_s
    return own | {"predicted_s": seconds, "plan": plan}
