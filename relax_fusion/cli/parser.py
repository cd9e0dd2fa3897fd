"""The arguments of the commands."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from .. import __version__
from ..validation import printable
from .argument_types import PLANS, natural, path, target
from .model_arguments import (
    Commands,
    add_count,
    add_dump,
    add_file,
    add_flag,
    add_measured,
    add_model_arguments,
    add_prompt,
    command,
)
from .studio_parsers import add_bench, add_diff, add_inspect, add_workloads

EXAMPLES = """\
examples:
  relax-fusion demo                                    see what fusing gives on this machine
  relax-fusion explain llama-3.1-8b --target h200      what would be fused, and why not the rest
  relax-fusion explain llama-3.1-8b --target h200 --html report.html
                                                       the same and more, for a browser
  relax-fusion compile ./my-llama -o my-llama.cpu      for this machine's processor
  relax-fusion compile ./my-llama --target h200 -o my-llama.h200
                                                       cross-compile; no GPU is needed
  relax-fusion compile ./my-llama --target h200 --tensor-parallel 2 -o my-llama.2
                                                       for two workers with a GPU each
  relax-fusion tune ./my-llama --database times.jsonl --seconds 120
                                                       measure kernels; compile --database takes
                                                       the fastest
  relax-fusion calibrate -o mine.json                   measure this machine; --target mine.json
                                                       prices plans by that
  relax-fusion run my-llama.cpu --prompt "Once upon" --max-new-tokens 20
  relax-fusion bench my-llama.cpu --prompt 512          tokens a second, kernel by kernel
  relax-fusion workloads llama-3.1-8b --seq 128..4096 --on h100,a100,rtx4090
                                                       its matmuls, and their time on each device
  relax-fusion diff old.cpu new.cpu                    what changed between two compilations
  relax-fusion inspect my-llama.cpu                    its page for a browser, report.html
  relax-fusion compile encoder.onnx --bound batch=8 -o encoder.cpu
  relax-fusion run encoder.cpu --input ids=ids.npy --input mask=mask.npy --output result.npz
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like every other error of the program."""

    def error(self, message: str) -> NoReturn:
        message = printable(message.replace("\n", " "))
        self.exit(2, f"relax-fusion: error: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; ``args.handler(args, console)`` runs the command that was chosen."""
    parser = _Parser(
        prog="relax-fusion",
        description="Fused transformer kernels as TVM Relax passes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_compile(commands)
    _add_tune(commands)
    _add_calibrate(commands)
    _add_run(commands)
    add_bench(commands)
    _add_explain(commands)
    add_workloads(commands)
    add_diff(commands)
    add_inspect(commands)
    return parser


def _versions() -> str:
    try:
        tvm = version("apache-tvm")
    except PackageNotFoundError:  # TVM built from source has no such distribution
        tvm = "from source"
    return f"relax-fusion {__version__} (TVM {tvm})"


def _add_demo(commands: Commands) -> None:
    parser = command(
        commands,
        "demo",
        "..studio.demo:demo_command",
        "compile a small LLaMA and GPT-2 with TVM's pipeline and with ours, and compare",
        "Takes less than a minute on 2 cores; needs no network, checkpoint or GPU. Weights are "
        "random. The exit code is 1 if the outputs disagree.",
    )
    add_flag(parser, "--quick", help="tiny models, for a quick check")


def _add_compile(commands: Commands) -> None:
    parser = command(
        commands,
        "compile",
        ".compile:compile_command",
        "compile a model to a directory that `run` and TVM can load",
        "OUT gets lib.so, manifest.json, report.json (what was fused and why, for `diff` and "
        "`inspect`) and, where SRC has them, params.safetensors and tokenizer.json. "
        "It appears when everything is written, or not at all. What a killed compilation left "
        "beside it (.OUT.*.part) is removed by the next one.",
    )
    add_model_arguments(parser)
    add_measured(parser)
    add_file(parser, "-o", "--output", metavar="OUT", required=True, help="directory to make")
    add_flag(
        parser, "--force", help="replace OUT if it holds what its manifest says, and nothing else"
    )
    add_flag(parser, "--no-weights", help="compile only; copy no weights")
    add_flag(
        parser,
        "--no-cuda-graph",
        help="launch every kernel by itself, instead of replaying those of static shapes as graphs",
    )
    add_flag(
        parser,
        "--cubins",
        help="compile TVM's CUDA kernels now, by NVRTC, and not when lib.so is loaded",
    )
    add_dump(parser)


def _add_tune(commands: Commands) -> None:
    parser = command(
        commands,
        "tune",
        ".tune:tune_command",
        "measure the best-priced kernels of a model, for `compile --database` to choose by",
        "Times are kept in FILE one by one, so that an interrupted run loses nothing and the next "
        "one goes on from there. The most expensive chains come first.",
    )
    add_model_arguments(parser)
    add_file(parser, "--database", required=True, help="where times are kept")
    add_count(parser, "--seconds", type=natural, help="begin nothing more after that many")
    parser.add_argument(
        "--rpc",
        metavar="HOST:PORT[/KEY]",
        help="measure on another machine, where a TVM RPC server listens; with KEY, one that a "
        "tracker knows by it",
    )
    add_count(
        parser, "--most", default=PLANS, help=f"plans for each range of rows (default: {PLANS})"
    )
    add_flag(parser, "--again", help="measure also what FILE has")


def _add_calibrate(commands: Commands) -> None:
    parser = command(
        commands,
        "calibrate",
        ".calibrate:calibrate_command",
        "measure the rates of this machine's device, for `--target FILE.json`",
        "Bandwidths, rates of arithmetic and launches are fitted to the times of some kernels. "
        "FILE is written after each of them, so that an interrupted run loses nothing and the next "
        "one goes on from there. What no kernel tells keeps its number, and the report says so.",
    )
    told = "which device to measure (default: that of --target, or the processor)"
    parser.add_argument("--device", choices=("cpu", "cuda"), help=told)
    parser.add_argument(
        "--target", type=target, help="what the device is, as for `compile` (default: found out)"
    )
    add_file(parser, "-o", "--output", required=True, help="where to write it; ends in .json")
    told = "begin nothing more after that many (default: 300)"
    add_count(parser, "--seconds", type=natural, default=300, help=told)
    add_flag(parser, "--again", help="measure also what FILE has")


def _add_run(commands: Commands) -> None:
    parser = command(
        commands,
        "run",
        ".run:run_command",
        "generate tokens, greedily, or call a function with arrays, by what `compile` made",
        "Of a decoder, a prompt is continued. Every other model takes its inputs as arrays.",
    )
    parser.add_argument("out", type=path, metavar="OUT", help="a directory that `compile` made")
    add_prompt(parser).add_argument(
        "--input",
        action="append",
        type=path,
        dest="inputs",
        metavar="NAME=FILE.npy",
        help="an input of a model that generates no text, or FILE.npz with several by their names; "
        "can be repeated",
    )
    add_file(
        parser,
        "--output",
        metavar="DIR",
        help="new directory for the outputs, one NAME.npy each, or a new FILE.npz",
    )


def _add_explain(commands: Commands) -> None:
    parser = command(
        commands,
        "explain",
        ".explain:explain_command",
        "say what would be fused, with which tiles and predicted times, and why not the rest",
        "Reads only the configuration; allocates no weights and compiles nothing.",
    )
    parser.set_defaults(page="..studio.report_page:report_html")
    add_model_arguments(parser)
    add_measured(parser)
    add_flag(
        parser,
        "--all",
        help="every row in full, however long, and what one pass declined and another took",
    )
    add_flag(parser, "--graphs", help="say what each kernel computes, statement by statement")
    add_flag(
        parser,
        "--coverage",
        help="count chains found, launches, and bytes that are only copied, function by function",
    )
    add_file(
        parser,
        "--html",
        help="write one page for a browser as well, which needs no network: chains with their "
        "plans and times, what was not fused and why, graphs, kernels; a FILE that exists is "
        "replaced",
    )
    add_dump(parser)
