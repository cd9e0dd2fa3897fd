"""The public API is what `tests/data/public_api.txt` says; a change of it is seen.

``RELAX_FUSION_REWRITE=1 python -m pytest tests/test_public_api.py`` writes it anew.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "data" / "public_api.txt"
MODULES = (
    *("relax_fusion", "relax_fusion.canonical", "relax_fusion.dlight_rules"),
    *("relax_fusion.frontends", "relax_fusion.hardware", "relax_fusion.inventory"),
    *("relax_fusion.mlc", "relax_fusion.models", "relax_fusion.triton_bridge"),
)


def described() -> Iterator[str]:
    """Yield a line for each public name, and one for each public member of a class."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            yield f"{module_name}.{name}{_kind(value)}"
            if inspect.isclass(value) and value.__module__.startswith("relax_fusion"):
                yield from (f"{module_name}.{name}.{line}" for line in _members(value))


def _kind(value: Any) -> str:
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        return f": class({bases})"
    return _signature(value) if inspect.isroutine(value) else f": {type(value).__name__}"


def _members(kind: type) -> Iterator[str]:
    """Yield what a class has of its own: fields with defaults, methods, properties."""
    own = {f.name: f for f in fields(kind)} if is_dataclass(kind) else {}
    for name, field in own.items():
        if not name.startswith("_"):
            needed = field.default is MISSING and field.default_factory is MISSING
            yield f"{name}: {field.type}{'' if needed else ' = ...'}"
    for name, value in sorted(vars(kind).items()):
        if name.startswith("_") or name in own:
            continue
        if isinstance(value, property):
            yield f"{name}: property"
        elif inspect.isroutine(value) or isinstance(value, staticmethod | classmethod):
            yield f"{name}{_signature(getattr(kind, name))}"


def _signature(function: Any) -> str:
    try:
        text = str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(...)"
    return re.sub(r"<[^<>]* at 0x[0-9a-f]+>", "...", text).replace("'", "")


def test_nothing_changes_unseen() -> None:
    found = [f"{line}\n" for line in described()]
    if os.environ.get("RELAX_FUSION_REWRITE"):
        RECORDED.write_text("".join(found), encoding="utf-8")
    recorded = RECORDED.read_text(encoding="utf-8").splitlines(keepends=True)
    assert "".join(unified_diff(recorded, found, "recorded", "found", n=0)) == ""


def test_every_public_name_is_described() -> None:
    without = []
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value):
                without.append(f"{module_name}.{name}")
    assert without == []
