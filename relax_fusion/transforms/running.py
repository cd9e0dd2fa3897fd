"""Running passes: which one runs, whose kernel it makes, and what comes out of TVM where it fails.

TVM's FFI makes a RuntimeError of every class of errors that it was not told of, and a new instance
of the others.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.ir.transform import Pass

from .. import errors
from ..compute import description
from ..errors import RelaxFusionError

CALLER = "the caller's own code"
"""This name stands for a pass while a function of the caller runs, such as `progress`."""


class _Running(threading.local):
    what = ""
    chain = ""


_running = _Running()


def running() -> tuple[str, str]:
    """Return the pass that runs, or failed, and the key of the workload whose kernel it makes."""
    return _running.what, _running.chain


def enter(what: str) -> None:
    """Note what runs from here on; no pass, if it is empty."""
    _running.what, _running.chain = what, ""


def run_pass(one: Pass, mod: ir.IRModule) -> ir.IRModule:
    """Run a pass as `tvm.transform.Sequential` does, which decides whether it is run."""
    enter(name_of(one))
    return tvm.transform.Sequential([one])(mod)


@contextmanager
def making(func: tirx.PrimFunc) -> Iterator[None]:
    """Note whose kernel is made, if it is a fused PrimFunc's, in a context that raises."""
    try:
        yield
    except Exception:
        described = description(func)
        _running.chain = described[0].key if described is not None else ""
        raise


def name_of(one: Pass) -> str:
    """Return the name of a pass; of passes in a row that have none together, their names."""
    parts = getattr(one, "passes", None)
    if one.info.name == "sequential" and parts:
        return ", ".join(name_of(part) for part in parts)
    return str(one.info.name)


@contextmanager
def no_cycles_collected() -> Iterator[None]:
    """Keep Python from looking for cycles, each time through all objects of TVM and of a module.

    Modules are made of objects without cycles, which go when nothing refers to them any more.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


for _error in (KeyboardInterrupt, *vars(errors).values()):
    if isinstance(_error, type) and issubclass(_error, KeyboardInterrupt | RelaxFusionError):
        tvm_ffi.register_error(_error)

_NAME = "relax_fusion.Passing"
_NUMBERS = itertools.count()


class _Passing(Exception):
    """Stands for an error while it passes; as text it is the number of that error."""


class _Last(threading.local):
    number = ""
    error: BaseException | None = None


_last = _Last()


class _Itself(Exception):
    """Makes the error that passed of its number; to the FFI it is the class of the error."""

    def __new__(cls, number: str) -> BaseException:  # type: ignore[misc]
        error = _last.error if _last.number == number else None
        return RuntimeError("an error that passed before") if error is None else error


tvm_ffi.register_error(_NAME, _Passing)  # how it goes in
tvm_ffi.register_error(_NAME, _Itself)  # how it comes out


@contextmanager
def as_themselves() -> Iterator[None]:
    """Let what a user's function raises come out of TVM as itself, whatever its class."""
    _last.error = None
    try:
        yield
    except BaseException as err:
        _last.number, _last.error = str(next(_NUMBERS)), err
        raise _Passing(_last.number) from err
