"""The library of a compiled directory, and the device that it runs on."""

from __future__ import annotations

from pathlib import Path

import tvm
from tvm.target import Target

from ..errors import TargetError
from ..hardware.target import device_of, host_target, is_cpu, make_target
from .build import FOREIGN_ERRORS
from .console import CliError, Console, first_line
from .manifest import LIBRARY, MANIFEST, Manifest, check_library


def device_for(directory: Path, manifest: Manifest, console: Console) -> tvm.runtime.Device:
    """Return the device that a directory was compiled for.

    Raises
    ------
    CliError
        If it is not here, or the manifest names none.
    """
    try:
        target = make_target(manifest.target)
        device_of(target)  # refuses what no library of ours is for
    except TargetError as err:
        raise CliError(f"{directory / MANIFEST} is damaged: {err}") from err
    if not is_cpu(target):
        return device_here(target)
    made, here = target.attrs.get("mcpu"), host_target().attrs.get("mcpu")
    if made and made != here:
        console.warn(f"compiled for a {made} processor, this is a {here}; it may stop at once")
    return tvm.cpu()


def device_here(target: Target, number: int = 0) -> tvm.runtime.Device:
    """Return the device of a target, the first of its kind by default.

    Raises
    ------
    CliError
        If it is not here.
    """
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

    Raises
    ------
    CliError
        If it cannot be loaded, or was compiled from something else.
    """
    try:
        library = tvm.runtime.load_module(str(directory / LIBRARY))
    except FOREIGN_ERRORS as err:
        raise CliError(f"{directory / LIBRARY} cannot be loaded: {first_line(err)}") from err
    check_library(library, manifest, directory / LIBRARY)
    return library
