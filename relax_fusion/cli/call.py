"""``relax-fusion run`` with arrays: one call of a function that generates no text."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ..frontends import Signature
from ..models import random_weights
from .arrays import check_new, read_inputs, write_outputs
from .build import device_for, load_library
from .console import FOREIGN_ERRORS, CliError, Console, first_line
from .manifest import (
    MANIFEST,
    PARAMS,
    Compiled,
    Manifest,
    check_files,
    exported_again,
    stored_weights,
)


def call_command(args: argparse.Namespace, console: Console, manifest: Manifest) -> int:
    """Call the function of a directory, print and write what it returns."""
    directory, signature = Path(args.out), manifest.signature
    if signature is None:
        raise CliError(f"{directory / MANIFEST} is damaged: it says no inputs of {manifest.source}")
    out = None if args.output is None else check_new(args.output)
    arrays = read_inputs(args.inputs or (), signature)
    check_files(directory, manifest)
    device = device_for(directory, manifest, console)
    console.step("loading the library and the weights")
    weights = weights_of(directory, manifest, args.seed or 0)
    call = Call(load_library(directory, manifest), manifest, device, arrays, weights)
    console.step(f"calling {manifest.functions[0]}")
    start = time.perf_counter()
    try:
        results = call.arrays(call())
    except FOREIGN_ERRORS as err:
        raise CliError(f"{manifest.source} cannot take these inputs: {first_line(err)}") from err
    seconds = time.perf_counter() - start
    outputs = _named(results, signature)
    if out is not None:
        write_outputs(out, outputs)
    _print(args, console, outputs, seconds)
    return 0


class Call:
    """A function on the device with its inputs, ready to be called.

    `compiled`: an executable or a library.
    `manifest`: says the function, the first, and how it takes weights.
    `device`: where it runs.
    `inputs`, `weights`: what it takes, in order.
    """

    def __init__(
        self,
        compiled: object,
        manifest: Compiled,
        device: tvm.runtime.Device,
        inputs: Iterable[np.ndarray],
        weights: Iterable[np.ndarray],
    ) -> None:
        self.machine, self._device = relax.VirtualMachine(compiled, device), device
        self._function = self.machine[manifest.functions[0]]
        put, stored = (
            [tvm.runtime.tensor(array, device) for array in arrays] for arrays in (inputs, weights)
        )
        # A model that is built from a configuration takes its weights as one tuple.
        self._args = [*put, *(stored if manifest.config is None else [stored])]

    def __call__(self) -> object:
        """Call the function and wait until the device is done."""
        result = self._function(*self._args)
        self._device.sync()
        return result

    def arrays(self, result: object) -> list[np.ndarray]:
        """Return a result's arrays."""
        return list(arrays_of(result))


def weights_of(directory: Path, manifest: Manifest, seed: int) -> Iterable[np.ndarray]:
    """Return the weights, which are those that the manifest says."""
    if manifest.weights == "random":
        return random_weights(exported_again(manifest), seed)
    if manifest.config is not None:
        exported_again(manifest)  # complains of another version's parameters
    return _checked(directory, manifest)


def _checked(directory: Path, manifest: Manifest) -> Iterator[np.ndarray]:
    stored = stored_weights(directory, manifest)
    for array, param in zip(stored, manifest.parameters, strict=True):
        if array.shape != param.shape or str(array.dtype) != param.dtype:
            raise CliError(
                f"{directory / PARAMS} holds {param.name!r} as {array.dtype} {list(array.shape)}, "
                f"{MANIFEST} says {param.dtype} {list(param.shape)}; compile the model again"
            )
        yield array


def arrays_of(result: Any) -> Iterator[np.ndarray]:
    """Return the tensors and shapes of a result, tuples taken apart."""
    if isinstance(result, tvm.runtime.Tensor):
        yield result.numpy()
    elif isinstance(result, tvm.runtime.ShapeTuple):
        yield np.array(list(result), "int64")
    elif isinstance(result, int | float | bool):
        yield np.asarray(result)
    elif result is not None:
        for part in result:
            yield from arrays_of(part)


def _named(results: list[np.ndarray], signature: Signature) -> dict[str, np.ndarray]:
    """Give outputs the names of the signature, a second one of a name a number."""
    names = [spec.name for spec in signature.outputs]
    if len(names) != len(results):
        names = [f"output_{n}" for n in range(len(results))]
    found: dict[str, np.ndarray] = {}
    for name, array in zip(names, results, strict=True):
        unique, n = name, 1
        while unique in found:
            unique, n = f"{name}_{n}", n + 1
        found[unique] = array
    return found


def _print(
    args: argparse.Namespace, console: Console, outputs: dict[str, np.ndarray], seconds: float
) -> None:
    if args.json:
        told = {n: {"dtype": str(a.dtype), "shape": list(a.shape)} for n, a in outputs.items()}
        console.json({"outputs": told, "output": args.output, "ms": seconds * 1e3})
        return
    for name, array in outputs.items():
        console.result(f"{name}  {array.dtype} {list(array.shape)}{_range(array)}")
    where = "; --output writes them" if args.output is None else f", in {args.output}"
    console.result(f"\n{len(outputs)} outputs in {seconds * 1e3:.1f} ms{where}")


def _range(array: np.ndarray) -> str:
    """Say between which numbers the elements lie; of NaN, that there is one."""
    if not array.size:
        return ", without elements"
    wide = array.astype("float64")
    return f" from {wide.min():.6g} to {wide.max():.6g}"
