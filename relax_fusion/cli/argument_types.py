"""What the arguments of the commands are read as, and what can be chosen by name.

The parser has it from here, so that help does not wait for TVM.
"""

from __future__ import annotations

import argparse
import io
from contextlib import redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import TargetError
from ..validation import MAX_INT32, shown

if TYPE_CHECKING:
    from tvm.target import Target

    from ..report.sizes import SizeRange


BACKENDS = ("auto", "tir", "triton")
DTYPES = ("float32", "float16", "bfloat16")
MODELS = (
    *("llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "llama-2-7b", "qwen3-30b-a3b"),
    *("mixtral-8x7b", "gpt-oss-20b", "gpt2", "bert-base", "demo-llama", "demo-gpt2"),
)
PASSES = (
    *("MendImports", "MergeDuplicates", "ChooseExperts", "MultiplyBytes", "MultiplyConvolutions"),
    *("MoveReshapes", "MoveTransposes", "RecogniseOperators", "PadRotations", "MoveSlices"),
    *("SplitProjections", "MoveNorms", "SimplifyAlgebra", "FuseNormRotation", "RouteExperts"),
    *("FuseAdapters", "FuseChains", "FuseExperts", "FuseGatedFFN", "FuseRMSNormMatmul"),
    *("FuseAttentionChain", "FuseProjections", "FuseMatmulEpilogue"),
)
PEERS = ("tvm", "torch", "torch-compile", "torch-graphs")
QUANTIZATIONS = (
    *("q3f16_0", "q3f16_1", "q4f16_0", "q4f16_1"),
    *("q4bf16_0", "q4bf16_1", "q4f32_1", "q8f16_1", "mxfp4"),
)
PLANS = 8
"""Plans that `tune` measures for each range of rows, unless it is told otherwise."""


def target(name: str) -> Target:
    """Read the target that a name stands for."""
    from ..hardware.target import make_target  # TVM, which help need not wait for

    try:
        with redirect_stdout(io.StringIO()):  # TVM prints that it does not find a ROCm
            return make_target(name)
    except TargetError as err:
        raise argparse.ArgumentTypeError(str(err)) from err


def pass_name(name: str) -> str:
    """Read the name of a pass, or the key of a workload."""
    from ..options import known_pass  # TVM, which help need not wait for

    try:
        return known_pass(name)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"{shown(name)} {err}") from err


class Named(argparse.Action):
    """Collects NAME=VALUE, each name once: which of two values is meant cannot be known."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        _option: str | None = None,
    ) -> None:
        """Add what was read of one option to those before."""
        found = list(getattr(namespace, self.dest) or ())
        if values[0] in dict(found):
            raise argparse.ArgumentError(self, f"{shown(values[0])} is given twice")
        setattr(namespace, self.dest, [*found, values])


def path(text: str) -> str:
    """Read a path that a file can have."""
    if not text:  # a variable of a shell that is not set; the working directory is "."
        raise argparse.ArgumentTypeError("it is empty; give a path")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{shown(text)} can be the name of no file")
    return text


def at_least(least: int, text: str) -> int:
    """Read an integer from `least` on."""
    if text.isdecimal() and len(text) < 20 and least <= int(text) <= MAX_INT32:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"{shown(text)} is not an integer between {least} and {MAX_INT32}"
    )


positive, natural = partial(at_least, 1), partial(at_least, 0)


def bound(text: str) -> tuple[str, int]:
    """Read NAME=N as name and number."""
    name, _, number = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not of the form NAME=N")
    return name, positive(number)


def size_range(text: str) -> SizeRange:
    """Read N, or N..M, as the sizes from N to M."""
    from ..report.sizes import SizeRange  # the estimator, which help need not wait for

    first, dots, last = text.partition("..")
    low = positive(first)
    high = positive(last) if dots else low
    if high < low:
        raise argparse.ArgumentTypeError(f"{shown(text)} ends before it begins; give N..M, N <= M")
    return SizeRange(low, high)


def named_range(text: str) -> tuple[str, SizeRange]:
    """Read NAME=N or NAME=N..M as name and sizes."""
    name, _, sizes = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not of the form NAME=N or NAME=N..M")
    return name, size_range(sizes)


def devices(text: str) -> list[Target]:
    """Read names of devices, with commas between them, as targets; each once."""
    return [target(name) for name in names(text, "devices such as h100,a100,llvm")]


def names(text: str, what: str = "names such as one,two") -> tuple[str, ...]:
    """Read names with commas between them; each once."""
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{shown(text)} is no list of {what}")
    return found


def token_ids(text: str) -> list[int]:
    """Read token numbers."""
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isdecimal() and len(part) < 20 for part in parts):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a list of token numbers such as 1,2,3"
        )
    return [int(part) for part in parts]
