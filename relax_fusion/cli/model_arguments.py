"""Arguments that several commands have."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any, TypeAlias

from ..hardware import DEVICES
from .argument_types import (
    BACKENDS,
    DTYPES,
    MODELS,
    PASSES,
    QUANTIZATIONS,
    Named,
    bound,
    names,
    natural,
    pass_name,
    path,
    positive,
    target,
    token_ids,
)

SRC_HELP = (
    "a Hugging Face directory (config.json and safetensors), a config.json alone (random weights), "
    "an ONNX file (.onnx), a program that torch.export saved (.pt2), or a bundled configuration: "
    f"{', '.join(MODELS)}"
)


Commands: TypeAlias = "argparse._SubParsersAction[Any]"
"""The type of the object that commands are added to."""


def command(
    commands: Commands,
    name: str,
    handler: str,
    summary: str,
    details: str = "",
    *,
    json_flag: bool = True,
) -> argparse.ArgumentParser:
    """Add a command with the options that all of them have.

    `handler` is its function as ``"module:name"``, imported when the command runs.
    """
    parser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {details}".strip()
    )
    parser.set_defaults(handler=handler)
    if json_flag:
        add_flag(parser, "--json", help="one JSON document on stdout")
    add_flag(parser, "-q", "--quiet", help="no progress on stderr")
    add_flag(parser, "--traceback", help="show the traceback of an error")
    return parser


def add_flag(parser: argparse.ArgumentParser, *names: str, help: str) -> None:
    """Add an option without a value."""
    parser.add_argument(*names, action="store_true", help=help)


def add_file(
    parser: argparse.ArgumentParser, *names: str, help: str, metavar: str = "FILE", **more: Any
) -> None:
    """Add an option that names a file or a directory."""
    parser.add_argument(*names, type=path, metavar=metavar, help=help, **more)


def add_count(parser: argparse.ArgumentParser, *names: str, help: str, **more: Any) -> None:
    """Add an option that is a number: from 1 on, or of the ``type`` that is given."""
    parser.add_argument(*names, **{"type": positive, "metavar": "N", **more}, help=help)


def add_sizes(
    parser: argparse.ArgumentParser, name: str, *, help: str, type: Any = bound, values: str = "N"
) -> None:
    """Add an option that gives values to symbolic sizes, each by its name."""
    metavar, told = f"NAME={values}", f"{help}; can be repeated"
    parser.add_argument(name, action=Named, type=type, default=[], metavar=metavar, help=told)


def add_prompt(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add what a compiled decoder is run on, and return the group of one of which it is."""
    told = "of the random weights, where the directory has none (default: 0)"
    add_count(parser, "--seed", type=natural, help=told)
    add_count(parser, "--max-new-tokens", "--new-tokens", help="of a prompt (default: 16)")
    prompt = parser.add_mutually_exclusive_group()
    told = "the prompt as token numbers"
    prompt.add_argument("--prompt-ids", type=token_ids, metavar="1,2,3", help=told)
    told = "the prompt; needs tokenizer.json in the directory"
    prompt.add_argument("--prompt", metavar="TEXT", help=told)
    return prompt


def add_measured(parser: argparse.ArgumentParser) -> None:
    """Add the options by which plans are chosen by measured times."""
    told = "times that `tune` measured: where there are some, the fastest plan is taken"
    add_file(parser, "--database", help=told)


def add_dump(parser: argparse.ArgumentParser) -> None:
    """Add what is dumped, and where to."""
    add_file(
        parser,
        "--debug-dump",
        metavar="DIR",
        help="write the module after each phase as TVMScript, passes.json (what each pass changed) "
        "and report.json; `inspect DIR` makes pages of them",
    )
    parser.add_argument(
        "--dump-functions",
        type=names,
        default=(),
        metavar="NAME,...",
        help="of --debug-dump: these functions alone, and what they call",
    )
    parser.add_argument(
        "--dump-phases",
        type=names,
        default=(),
        metavar="N,...",
        help="of --debug-dump: these phases alone, such as 1,4,final",
    )


def add_model_arguments(
    parser: argparse.ArgumentParser, *, batch: bool = True, help: str = SRC_HELP
) -> None:
    """Add SRC and what says of it which model is built, and how it is fused."""
    gpus = ", ".join(name for name, spec in DEVICES.items() if spec.kind == "gpu")
    parser.add_argument("source", type=path, metavar="SRC", help=help)
    parser.add_argument(
        "--target",
        type=target,
        default="llvm",
        help=f"llvm (this machine, the default), {gpus}, a device file that `calibrate` wrote, "
        "or a TVM target as JSON",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of weights and activations (default: float32 on a CPU, float16 on a GPU)",
    )
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        metavar="NAME",
        help=f"store weights in few bits, by MLC-LLM's names, or those of experts alone, mxfp4: "
        f"{', '.join(QUANTIZATIONS)}",
    )
    told = "most tokens of a sequence (default: the model's own, at most 4096)"
    add_count(parser, "--max-seq-len", help=told)
    add_count(
        parser,
        "--tensor-parallel",
        help="spread a decoder over so many workers, each with a GPU of its own, or all on the CPU "
        "(default: 1)",
    )
    if batch:
        add_count(parser, "--batch", help="sequences at once (default: 1)")
    add_sizes(
        parser,
        "--bound",
        help="largest value of a symbolic size of an .onnx or .pt2 file, so that memory can be "
        "planned",
    )
    told = "rows that went to each expert, by `workloads --record`: kernels are chosen for that"
    add_file(parser, "--expert-load", help=told)
    _add_fusing_arguments(parser)


CHANGING = (
    *("bound", "disable", "always_fuse", "allow_tf32", "validate", "backend", "database"),
    *("no_cuda_graph", "cubins", "inexact", "tensor_parallel", "allow_int8_rows"),
    "expert_load",
)
"""Options beside those of the model and the target that change what is compiled."""


def asked(args: argparse.Namespace) -> dict[str, str]:
    """Return the options of `CHANGING` that were given, as text for people and for `diff`."""
    told = {}
    for name in CHANGING:
        value = getattr(args, name, None)
        if isinstance(value, list):
            each = ("=".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in value)
            value = ", ".join(sorted(each))
        if value and value != "auto":
            told[name] = "yes" if value is True else str(value)
    return told


_PIPELINE = (
    *("disable", "always_fuse", "allow_tf32", "validate", "backend", "database", "cubins"),
    *("debug_dump", "dump_functions", "dump_phases", "allow_int8_rows", "expert_load"),
)


def pipeline_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the pipeline is told by those of its options that a command has."""
    given = {name: getattr(args, name, None) for name in _PIPELINE}
    told = {name: value for name, value in given.items() if value is not None}
    if hasattr(args, "no_cuda_graph"):
        told["use_cuda_graph"] = not args.no_cuda_graph
    if hasattr(args, "inexact"):
        told["exact"] = not args.inexact
    return told


def _add_fusing_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--disable",
        action="append",
        type=pass_name,
        default=[],
        metavar="PASS",
        help="leave out a pass, or what a report names by a key of 8 digits; can be repeated: "
        f"{', '.join(PASSES)}",
    )
    add_flag(
        parser,
        "--always-fuse",
        help="fuse also where the estimator predicts a loss, to look at kernels or measure them",
    )
    add_flag(
        parser,
        "--allow-tf32",
        help="let tensor cores multiply float32 with 10 bits of mantissa (CUDA, sm_80 or newer)",
    )
    add_flag(
        parser,
        "--allow-int8-rows",
        help="let CPUs round rows to int8 in front of weights of 4 and 8 bits: many rows take a "
        "third of the time, results err by about a hundredth (AVX-512 VNNI or AVX-VNNI)",
    )
    add_flag(
        parser,
        "--inexact",
        help="allow algebraic rules that the numerical contract does not: their results may "
        "overflow, or lose digits, where the model's do not",
    )
    parser.add_argument(
        "--validate",
        action="store_const",
        const=True,
        default=False,
        help="check by numpy that every kernel computes what it replaces, and leave a chain alone "
        "where it does not",
    )
    parser.add_argument(
        "--validate-strictly",
        action="store_const",
        const="strict",
        dest="validate",
        help="the same, but fail there",
    )
    parser.add_argument(
        "--backend", choices=BACKENDS, default="auto", help="who emits the fused kernels"
    )


def named(name: str) -> Any:
    """Return a function by its name, ``"module:function"``, whose module is relative to this one's.

    Commands and pages of `relax_fusion.studio` are called so, which nothing imports.
    """
    module, function = name.split(":")
    return getattr(import_module(module, __package__), function)
