"""What Python's collector of garbage does while passes run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
