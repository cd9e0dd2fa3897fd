"""Modules of functions alone, to build one of them: the one place that makes modules."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import ir


def module_of(functions: Mapping[ir.GlobalVar, ir.BaseFunc]) -> ir.IRModule:
    """Return a module of functions alone, to make one of them that goes into another module."""
    return ir.IRModule(dict(functions))
