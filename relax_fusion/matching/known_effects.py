"""What functions do to memory, looked at once for all passes that leave them as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tvm import ir, relax

from .effects import Memory

_known: ContextVar[dict[str, tuple[relax.Function, Memory]] | None]
_known = ContextVar("known", default=None)


@contextmanager
def known_effects() -> Iterator[None]:
    """Let passes share the `Memory` of functions that none of them changes, until the end."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def memory_of(name: str, func: relax.Function, mod: ir.IRModule) -> Memory:
    """Return what the function of a name in a module does to memory."""
    known = _known.get()
    if known is None:
        return Memory(func, mod)
    before, memory = known.get(name) or (None, None)
    if memory is None or not func.same_as(before):
        memory = Memory(func, mod)
        known.pop(name, None)
        if not memory.looked_elsewhere:
            known[name] = func, memory
    return memory
