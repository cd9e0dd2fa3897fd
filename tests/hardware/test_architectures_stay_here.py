"""Outside of hardware/, nobody asks how an architecture is called: capabilities say what it has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import relax_fusion

ROOT = Path(relax_fusion.__file__).parent
FILES = [p for p in sorted(ROOT.rglob("*.py")) if (ROOT / "hardware") not in p.parents]

NAMES = {"arch", "capability", "compute_capability"}
ARCHITECTURE = re.compile(r"(sm_|compute_|gfx)\d*[a-z]?")
TOLD = re.compile(rf"\b({'|'.join(NAMES)})\b|{ARCHITECTURE.pattern}")
"""What stands in every file that decides by one."""


def asks(node: ast.AST) -> bool:
    """Tell whether an expression is an architecture."""
    if isinstance(node, ast.Call):
        return asks(node.func)
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in NAMES


def decisions(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that decide by an architecture."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            given = [node.left, *node.comparators]
            mapped = [getattr(c, "id", "") for c in node.comparators]
            if any(map(asks, given)) and "ARCHITECTURES" not in mapped:
                yield node.lineno
        elif isinstance(node, ast.Attribute) and asks(node.value):  # arch.startswith
            yield node.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "replace":
            if any(k.arg in NAMES for k in node.keywords):  # another device, for its architecture
                yield node.lineno
        elif isinstance(node, ast.BoolOp | ast.IfExp | ast.If):
            tested = node.values if isinstance(node, ast.BoolOp) else [node.test]
            if any(map(asks, tested)):
                yield node.lineno
        elif isinstance(node, ast.Constant) and ARCHITECTURE.fullmatch(str(node.value)):
            yield node.lineno


def without_f_strings(tree: ast.AST) -> ast.AST:
    """Drop the literal parts of f-strings, which are messages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            node.values = [v for v in node.values if not isinstance(v, ast.Constant)]
    return tree


def test_nobody_decides_by_an_architecture() -> None:
    assert len(FILES) > 200
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in FILES
        if TOLD.search(text := path.read_text(encoding="utf-8"))
        for line in decisions(without_f_strings(ast.parse(text)))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        'dev.arch == "x"',
        'dev.arch.startswith("s")',
        "dev.capability >= 90",
        "compute_capability(target) < first",
        "scalar = replace(dev, arch='')",
        "a if dev.arch else b",
        "dev.arch and b",
        'rates["sm_80"]',
        '{"sm_90a": 1}',
        'name.removeprefix("sm_")',
    ],
)
def test_the_check_sees_what_it_must(text: str) -> None:
    assert TOLD.search(text) and list(decisions(ast.parse(text)))


def test_the_check_lets_code_generators_be_told() -> None:
    text = "f = compile(arch=dev.arch, n=compute_capability(t)); print(f'for sm_80 {dev.arch}')"
    assert not list(decisions(without_f_strings(ast.parse(text))))
