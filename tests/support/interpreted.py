"""Runs the kernels in Triton's interpreter, in a process of its own.

Whether a function is interpreted is settled when it is decorated, Triton's own library included, so
the interpreter needs a process in which TRITON_INTERPRET was set before Triton was imported.
"""

from __future__ import annotations

import atexit
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its grid, and its arguments by name (a string names a tensor)."""

    module: str
    grid: tuple[int, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mapped:
    """A tensor by its name, of two dimensions, that is read in tiles by a descriptor."""

    name: str
    box: tuple[int, ...]


def not_dependent(constexprs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants of a launch that waits for no other."""
    if "C" in constexprs:
        return {**constexprs, "C": constexprs["C"]._replace(pdl=False)}
    return {name: False if name == "PDL" else value for name, value in constexprs.items()}


def same_tuple(like: tuple, values: Iterable[Any]) -> tuple:
    """Return values as a tuple with the names of another, if that has some."""
    return type(like)(*values) if hasattr(like, "_fields") else tuple(values)


def run(
    tensors: dict[str, np.ndarray],
    dtypes: dict[str, str],
    launches: list[Launch],
    device: str = "cpu",
    package: str = "relax_fusion.triton_bridge",
) -> Any:
    """Do the launches, in the worker or on a GPU, and return the tensors after them in float64."""
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    held = {
        n: torch.from_numpy(v).to(device, getattr(torch, dtypes[n])) for n, v in tensors.items()
    }

    def value(argument: Any) -> Any:
        if isinstance(argument, Mapped):
            return TensorDescriptor.from_tensor(held[argument.name], [*argument.box])
        if isinstance(argument, tuple):
            return same_tuple(argument, map(value, argument))
        return held[argument] if isinstance(argument, str) else argument

    with _patching_once() if device == "cpu" else nullcontext(set()) as patched:
        for launch in launches:
            module = importlib.import_module(f"{package}.kernels.{launch.module}")
            kernel = getattr(module, launch.module)
            arguments = {n: value(a) for n, a in launch.arguments.items()}
            patched.clear()
            kernel[launch.grid](**arguments, **launch.constants)
    return {n: v.double().cpu().numpy() for n, v in held.items()}


@contextmanager
def _patching_once() -> Iterator[set[str]]:
    """Let the interpreter patch Triton's language once a module: it would at every call.

    Yields
    ------
    set of str
        The modules whose functions have been called; to be emptied before each launch, as the
        interpreter takes its patches back behind one.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[str]()

    def once(function: Any) -> Any:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            return patch(function)
        return None

    interpreter._patch_lang = once
    try:
        yield patched
    finally:
        interpreter._patch_lang = patch


@cache
def _pool() -> ProcessPoolExecutor:
    """Return the process of all interpreters, started at the first use: that takes seconds."""
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    atexit.register(pool.shutdown)
    return pool


class Interpreter:
    """A worker process, the same for all.

    Parameters
    ----------
    function : callable
        What is done there; importable by its name.
    """

    def __init__(self, function: Callable[..., Any] = run) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        """Do `function` there."""
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            future: Future[Any] = _pool().submit(self.function, *args)  # the process starts here
        finally:
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            else:
                os.environ["TRITON_INTERPRET"] = before
        return future.result(timeout=120)

    def close(self) -> None:
        """End the process."""
        _pool().shutdown()
        _pool.cache_clear()
