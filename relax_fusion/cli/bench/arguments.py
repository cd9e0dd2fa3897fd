"""The arguments of ``bench``."""

from __future__ import annotations

import argparse

from ...validation import shown
from ..argument_types import Named, bound, natural, path, positive
from ..choices import PEERS
from ..model_arguments import SRC_HELP, Commands, add_measured, add_model_arguments, command


def add_bench(commands: Commands) -> None:
    """Add ``bench``."""
    parser = command(
        commands,
        "bench",
        ".bench.command:bench_command",
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
    add_measured(parser)
    parser.add_argument(
        "--no-cuda-graph",
        action="store_true",
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
    parser.add_argument("--no-kernels", action="store_true", help="do not time single kernels")
    parser.add_argument(
        "--device", type=natural, default=0, metavar="N", help="number of the GPU (default: 0)"
    )
    parser.add_argument(
        "--json",
        type=path,
        metavar="FILE",
        help="write all times as JSON, replacing FILE; - is stdout, without the tables",
    )
    parser.add_argument(
        "--html",
        type=path,
        metavar="FILE",
        help="write the page of the compiled model with what was measured, replacing FILE",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="threads of a CPU for everybody (default: for each the better of one, and one for "
        "each processor)",
    )
    parser.add_argument(
        "--prompt", type=positive, metavar="N", help="tokens of the prompt (default: 128)"
    )
    parser.add_argument(
        *("--max-new-tokens", "--new-tokens"),
        dest="new_tokens",
        type=positive,
        metavar="N",
        help="tokens after it (default: 32)",
    )
    parser.add_argument(
        "--size",
        action=Named,
        type=bound,
        default=[],
        metavar="NAME=N",
        help="a symbolic size of a model that generates no text, such as seq_len of a bundled "
        "encoder (default: 128); can be repeated",
    )
    parser.add_argument(
        "--repeat",
        type=positive,
        default=5,
        metavar="N",
        help="turns of each, after one that warms up (default: 5)",
    )
    parser.add_argument(
        "--seconds",
        type=natural,
        default=60,
        metavar="N",
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
