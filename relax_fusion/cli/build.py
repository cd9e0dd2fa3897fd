"""Compiling, and looking into what came out."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import tvm
from tvm import relax
from tvm.support import cc
from tvm.target import Target

from ..errors import RelaxFusionError
from ..validation import shown
from .console import CliError, first_line

FOREIGN_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""What TVM raises: every failed check of its C++ side arrives as one of these."""

_KERNEL = {
    "cuda": re.compile(r"__global__\s+void\s+(?:__launch_bounds__\(\w+\)\s*)?(\w+)\s*\("),
    "c": re.compile(r"static rf_kernel rf_kernel_(\w+) ="),
}


class Compilable(Protocol):
    """A model of any origin."""

    @property
    def mod(self) -> tvm.IRModule:
        """Its functions."""


def build(exported: Compilable, target: Target, **pipeline: Any) -> relax.VMExecutable:
    """Compile with the pipeline ``relax_fusion``.

    Parameters
    ----------
    **pipeline
        Arguments of the pipeline.

    Raises
    ------
    RelaxFusionError, CliError
        If an argument is refused, or TVM cannot compile the module.
    """
    made = relax.get_pipeline("relax_fusion", target=target, **pipeline)
    return guarded(lambda: tvm.compile(exported.mod, target=target, relax_pipeline=made), target)


def build_default(exported: Compilable, target: Target) -> relax.VMExecutable:
    """Compile with the pipeline that TVM itself takes for `target`."""
    made = relax.get_default_pipeline(target)
    with target:
        return guarded(lambda: tvm.compile(exported.mod, target, relax_pipeline=made), target)


def guarded(compile_it: Callable[[], Any], target: Target) -> Any:
    """Call, turning what TVM raises into one line."""
    try:
        return compile_it()
    except (RelaxFusionError, OSError):
        raise
    except FOREIGN_ERRORS as err:
        kind = target.kind.name
        raise CliError(f"TVM could not compile the model for {kind}: {first_line(err)}") from err


def require_linker() -> None:
    """Complain, before anything is compiled, where TVM will not be able to link a library."""
    compiler = cc.get_cc()
    if not compiler:
        raise CliError(
            "no C++ compiler was found, and TVM needs one to link lib.so; install g++ or clang++ "
            "(on Debian: apt install g++)"
        )
    if shutil.which(compiler) is None:
        raise CliError(
            f"the C++ compiler is {shown(compiler)}, by the variable CXX or CC; it must be one "
            "program, without arguments"
        )


def cuda_kernels(executable: relax.VMExecutable, kinds: Iterable[str] = _KERNEL) -> list[str]:
    """Return the names of an executable's CUDA kernels: as source ("cuda"), and as cubins ("c")."""
    names: set[str] = set()
    for module in _walk(executable.mod):
        if module.kind in kinds and module.kind in _KERNEL:
            names.update(_KERNEL[module.kind].findall(module.inspect_source()))
    return sorted(names)


def _walk(module: tvm.runtime.Module) -> Iterator[tvm.runtime.Module]:
    yield module
    for child in module.imports:
        yield from _walk(child)
