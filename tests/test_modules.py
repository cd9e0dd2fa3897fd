"""What a module carries besides its functions outlives every pass; nothing else makes modules."""

from __future__ import annotations

import ast
from pathlib import Path

import relax_fusion

ROOT = Path(relax_fusion.__file__).parent


def _is_module(call: ast.AST) -> bool:
    """Tell whether a node of the source makes an IRModule."""
    if not isinstance(call, ast.Call):
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in ("IRModule", "from_expr", "ir_module")


def test_modules_are_copied_not_made() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert files
    for path in files:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        assert [n.lineno for n in nodes if _is_module(n)] == [], path.name
