"""The arguments of the commands that look at a model, at compilations, or at a dump."""

from __future__ import annotations

import argparse

from ..validation import shown
from .argument_types import PEERS, devices, named_range, natural, path, size_range
from .model_arguments import (
    SRC_HELP,
    Commands,
    add_count,
    add_file,
    add_flag,
    add_measured,
    add_model_arguments,
    add_prompt,
    add_sizes,
    command,
)


def add_workloads(commands: Commands) -> None:
    """Add ``workloads``."""
    parser = command(
        commands,
        "workloads",
        "..studio.workloads:workloads_command",
        "list every matmul and attention of a model: sizes, counts, bytes and operations",
        "Fused chains and what is left of each function, prefill and decode of a decoder. Sizes "
        "that are not given stay symbolic; bytes and operations are then those at 512 tokens, or "
        "as many as fit, and at 64 of every other size. SRC can also be a directory that `compile` "
        "made. Nothing is compiled, and no weights are read, unless --record runs SRC.",
        json_flag=False,
    )
    add_model_arguments(parser, batch=False)
    parser.set_defaults(target=None)  # that of --on, if it is not given
    _add_counted(parser)
    parser.add_argument(
        "--on",
        type=devices,
        metavar="DEVICE,...",
        help="predict the time of each function on these devices, and what limits it: names as for "
        "--target, which is the first of them if it is not given; all price the chains of --target",
    )
    for name, what in (("csv", "a row for each item and each of its sizes"), ("json", "all of it")):
        told = f"write {what} as {name.upper()}, replacing FILE; - is stdout, without the table"
        add_file(parser, f"--{name}", help=told)
    told = "instead of all that, run SRC, a directory that `compile` made for a CPU, on a prompt "
    told += "(--prompt or --prompt-ids), and write how many rows went to each expert"
    add_file(parser, "--record", help=f"{told}, for --expert-load")
    add_prompt(parser)


def _add_counted(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch",
        type=size_range,
        metavar="N[..M]",
        help="sequences at once (default: 1); of a range both ends and the powers of two between "
        "are counted",
    )
    parser.add_argument(
        "--seq",
        type=size_range,
        metavar="N[..M]",
        help="tokens: of a prompt in prefill, of the context in decode, of an encoder's input",
    )
    told = "another symbolic size, by its name"
    add_sizes(parser, "--size", type=named_range, values="N[..M]", help=told)


def add_diff(commands: Commands) -> None:
    """Add ``diff``."""
    parser = command(
        commands,
        "diff",
        "..studio.diff:diff_command",
        "compare two compilations: chains gained and lost, plans, times, files, kernels",
        "The exit code is 0 if no chain was lost, whatever else differs, 1 if one was, and 2 if A "
        "or B is no compilation.",
    )
    for name in ("a", "b"):
        parser.add_argument(
            name,
            type=path,
            metavar=name.upper(),
            help="a directory that `compile` made, its report.json, or what `explain --json` wrote",
        )
    add_file(
        parser,
        "--html",
        help="write a page for a browser as well, with the differences of kernels' texts; a FILE "
        "that exists is replaced",
    )


def add_inspect(commands: Commands) -> None:
    """Add ``inspect``."""
    parser = command(
        commands,
        "inspect",
        "..studio.inspect:inspect_command",
        "write the page of a compilation, or the pages of a dump, for a browser",
        "The page of a compilation tells its chains with their plans and times, what was not fused "
        "and why, its graphs and its kernels. Of a dump, index.html tells what each pass changed, "
        "and report.html is the page of its report. Nothing is compiled, and nothing is served.",
    )
    parser.add_argument(
        "source",
        type=path,
        metavar="SRC",
        help="a directory that `compile` made, what `explain --json` wrote, or the directory of "
        "--debug-dump",
    )
    add_file(
        parser,
        "-o",
        "--output",
        help="the page of a compilation (default: report.html); a FILE that exists is replaced",
    )


def add_bench(commands: Commands) -> None:
    """Add ``bench``."""
    parser = command(
        commands,
        "bench",
        "..studio.bench.command:bench_command",
        "measure how fast a model is, kernel by kernel, beside TVM's default and torch",
        "Everybody runs the same calls in turn, in one process. The exit code is 1 if results with "
        "the same weights differ by more than rounding can explain. docs/measuring.md tells what "
        "is timed.",
        json_flag=False,
    )
    add_model_arguments(
        parser,
        help=f"a directory that `compile` made, or a model that is compiled first: {SRC_HELP}",
    )
    parser.set_defaults(force=False, no_weights=False, cubins=False)
    parser.set_defaults(debug_dump=None, dump_functions=(), dump_phases=())  # as of `compile`
    add_measured(parser)
    add_flag(
        parser,
        "--no-cuda-graph",
        help="as of `compile`: launch every kernel by itself; of a model that is not compiled yet",
    )
    _add_run(parser)
    parser.add_argument(
        "--against",
        type=peers,
        metavar="PEER,...",
        help=f"{', '.join(PEERS)}, or none (default: those that are installed "
        "and run on the device; on a CPU without torch.compile)",
    )
    add_flag(parser, "--no-kernels", help="do not time single kernels")
    add_count(parser, "--device", type=natural, default=0, help="number of the GPU (default: 0)")
    for name, what in (
        ("json", "all times as JSON, replacing FILE; - is stdout, without the tables"),
        ("html", "the page of the compiled model with what was measured, replacing FILE"),
    ):
        add_file(parser, f"--{name}", help=f"write {what}")


def _add_run(parser: argparse.ArgumentParser) -> None:
    add_count(
        parser,
        "--threads",
        help="threads of a CPU for everybody (default: for each the better of one, and one for "
        "each processor)",
    )
    add_count(parser, "--prompt", help="tokens of the prompt (default: 128)")
    add_count(
        parser,
        "--max-new-tokens",
        "--new-tokens",
        dest="new_tokens",
        help="tokens after it (default: 32)",
    )
    add_sizes(
        parser,
        "--size",
        help="a symbolic size of a model that generates no text, such as seq_len of a bundled "
        "encoder (default: 128)",
    )
    add_count(
        parser, "--repeat", default=5, help="turns of each, after one that warms up (default: 5)"
    )
    add_count(
        parser,
        "--seconds",
        type=natural,
        default=60,
        help="begin no more turns after that many; whoever has used up a fair part of them has no "
        "other (default: 60)",
    )


def peers(text: str) -> list[str]:
    """Read names of peers, with commas between them; none is nobody."""
    names = [name.strip() for name in text.split(",")]
    if names == ["none"]:
        return []
    wrong = next((name for name in names if name not in PEERS), None)
    if wrong is not None:
        raise argparse.ArgumentTypeError(f"{shown(wrong)} is none of {', '.join(PEERS)}, none")
    return names
