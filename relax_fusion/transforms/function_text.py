"""The text of one function, as dumps show it, and its size."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, relax, tirx

from ..report.text_changes import Kind


@dataclass(frozen=True)
class FunctionText:
    """A function as text.

    Parameters
    ----------
    kind : {"graph", "kernel", "other"}
        ``graph`` of a Relax function, ``kernel`` of a PrimFunc, ``other`` of what is elsewhere.
    lines : tuple of str
        TVMScript; constants are left out of it.
    bindings : int
        Of a Relax function: how many values it names.
    """

    kind: Kind
    lines: tuple[str, ...]
    bindings: int = 0


def kind_of(func: ir.BaseFunc) -> Kind:
    """Return what a function is: ``graph``, ``kernel`` or ``other``."""
    if isinstance(func, relax.Function):
        return "graph"
    return "kernel" if isinstance(func, tirx.PrimFunc) else "other"


def function_text(func: ir.BaseFunc) -> FunctionText:
    """Return the text of a function, without the printer's remarks about imports."""
    lines = func.script(show_meta=False).splitlines()
    kept = [line for line in lines if line and not line.startswith("# ")]
    return FunctionText(kind_of(func), tuple(kept), _bindings(func))


def _bindings(func: ir.BaseFunc) -> int:
    body = func.body if isinstance(func, relax.Function) else None
    blocks = body.blocks if isinstance(body, relax.SeqExpr) else ()
    return sum(len(block.bindings) for block in blocks)
