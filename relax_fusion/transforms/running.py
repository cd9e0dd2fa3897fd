"""Which pass runs in this thread, and whose kernel is made: by that it is known who fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import tvm
from tvm import ir, tirx
from tvm.ir.transform import Pass

from ..compute import description

CALLER = "the caller's own code"
"""Stands for a pass while a function of the caller runs, such as `progress`."""


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
