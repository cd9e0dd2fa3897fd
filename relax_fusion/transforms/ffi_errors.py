"""Errors on their way through TVM's FFI, behind which passes run.

It makes a RuntimeError of every class that it was not told of, and a new instance of the others.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import tvm_ffi

from ..errors import RelaxFusionError

_KNOWN: tuple[type, ...] = (
    *(KeyboardInterrupt, RelaxFusionError),
    *RelaxFusionError.__subclasses__(),
)
for _error in _KNOWN:
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
