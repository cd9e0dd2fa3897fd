"""Functions of the commands, which are imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def named(name: str) -> Any:
    """Return a function by its name, ``"module:function"``, whose module is relative to this one's.

    Commands and pages of `relax_fusion.studio` are called so, which nothing imports.
    """
    module, function = name.split(":")
    return getattr(import_module(module, __package__), function)
