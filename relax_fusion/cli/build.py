"""Compiling by TVM, and loading what was compiled on the device that it is for."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.support import cc
from tvm.target import Target

from ..errors import RelaxFusionError, TargetError
from ..frontends import ImportedModel
from ..hardware.target import device_of, host_target, is_cpu, make_target
from ..models import ExportedModel
from ..validation import shown
from .console import FOREIGN_ERRORS, CliError, Console, first_line
from .manifest import LIBRARY, MANIFEST, Manifest, check_library

_KERNEL = {
    "cuda": re.compile(r"__global__\s+void\s+(?:__launch_bounds__\(\w+\)\s*)?(\w+)\s*\("),
    "c": re.compile(r"static rf_kernel rf_kernel_(\w+) ="),
}


def build(
    exported: ExportedModel | ImportedModel, target: Target, **pipeline: Any
) -> relax.VMExecutable:
    """Compile with the pipeline ``relax_fusion`` and its arguments `pipeline`.

    Raises `RelaxFusionError` or `CliError` if one is refused, or TVM cannot compile the module.
    """
    made = relax.get_pipeline("relax_fusion", target=target, **pipeline)
    return guarded(lambda: tvm.compile(exported.mod, target=target, relax_pipeline=made), target)


def build_default(exported: ExportedModel | ImportedModel, target: Target) -> relax.VMExecutable:
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


def device_for(directory: Path, manifest: Manifest, console: Console) -> tvm.runtime.Device:
    """Return the device that a directory was compiled for.

    Raises `CliError` if it is not here, or the manifest names none.
    """
    try:
        target = make_target(manifest.target)
        device_of(target)  # refuses what no library of ours is for
    except TargetError as err:
        raise CliError(f"{directory / MANIFEST} is damaged: {err}") from err
    if not is_cpu(target):
        devices = [device_here(target, number) for number in range(manifest.shards)]
        return devices[0]
    made, here = target.attrs.get("mcpu"), host_target().attrs.get("mcpu")
    if made and made != here:
        console.warn(f"compiled for a {made} processor, this is a {here}; it may stop at once")
    return tvm.cpu()


def device_here(target: Target, number: int = 0) -> tvm.runtime.Device:
    """Return the device of a target, the first of its kind by default, if it is here."""
    if is_cpu(target):
        if number:
            raise CliError(f"--device {number} must be 0: the target is this machine's CPU", code=2)
        return tvm.cpu()
    device = tvm.device(target.kind.name, number)
    if not device.exist:
        which = f"device {number} of that kind" if number else "such device"
        raise CliError(
            f"the target is {target.kind.name}, and TVM finds no {which} here; copy the "
            "directory to a machine that has one, or compile with --target llvm"
        )
    return device


def load_library(directory: Path, manifest: Manifest) -> tvm.runtime.Module:
    """Load the library, if it is the one that the manifest describes.

    Raises `CliError` if it cannot be loaded, or was compiled from something else.
    """
    try:
        library = tvm.runtime.load_module(str(directory / LIBRARY))
    except FOREIGN_ERRORS as err:
        raise CliError(f"{directory / LIBRARY} cannot be loaded: {first_line(err)}") from err
    check_library(library, manifest, directory / LIBRARY)
    return library
