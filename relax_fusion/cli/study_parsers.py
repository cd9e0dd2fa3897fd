"""The arguments of the commands that look at a model, at compilations, or at a dump."""

from __future__ import annotations

import argparse

from .argument_types import Named, devices, named_range, path, size_range
from .model_arguments import Commands, add_model_arguments, command


def add_workloads(commands: Commands) -> None:
    """Add ``workloads``."""
    parser = command(
        commands,
        "workloads",
        ".workloads:workloads_command",
        "list every matmul and attention of a model: sizes, counts, bytes and operations",
        "Fused chains and what is left of each function, prefill and decode of a decoder. Sizes "
        "that are not given stay symbolic; bytes and operations are then those at 512 tokens, or "
        "as many as fit, and at 64 of every other size. SRC can also be a directory that `compile` "
        "made. Nothing is compiled, and no weights are read.",
        json_flag=False,
    )
    add_model_arguments(parser, batch=False)
    parser.set_defaults(target=None)  # that of --on, if it is not given
    _add_sizes(parser)
    parser.add_argument(
        "--on",
        type=devices,
        metavar="DEVICE,...",
        help="predict the time of each function on these devices, and what limits it: names as for "
        "--target, which is the first of them if it is not given; all price the chains of --target",
    )
    parser.add_argument(
        "--record",
        type=path,
        metavar="FILE",
        help="count by the sizes that `run --record FILE` met, in place of --batch, --seq and "
        "--size",
    )
    for name, what in (("csv", "a row for each item and each of its sizes"), ("json", "all of it")):
        parser.add_argument(
            f"--{name}",
            type=path,
            metavar="FILE",
            help=f"write {what} as {name.upper()}, replacing FILE; - is stdout, without the table",
        )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument(
        "--size",
        action=Named,
        type=named_range,
        default=[],
        metavar="NAME=N[..M]",
        help="another symbolic size, by its name; can be repeated",
    )


def add_diff(commands: Commands) -> None:
    """Add ``diff``."""
    parser = command(
        commands,
        "diff",
        ".diff:diff_command",
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
    parser.add_argument(
        "--html",
        type=path,
        metavar="FILE",
        help="write a page for a browser as well, with the differences of kernels' texts; a FILE "
        "that exists is replaced",
    )


def add_inspect(commands: Commands) -> None:
    """Add ``inspect``."""
    parser = command(
        commands,
        "inspect",
        ".inspect:inspect_command",
        "write the page of a dump: what each pass of a compilation changed",
        "`--debug-dump` writes it too; this writes it anew, from passes.json alone, for a dump "
        "that is old or was copied. Nothing is compiled, and nothing is served.",
    )
    parser.add_argument(
        "directory",
        type=path,
        metavar="DIR",
        help="what --debug-dump DIR made; its index.html is replaced",
    )
