"""The public API is what `tests/data/public_api.txt` says; a change of it is seen.

``RELAX_FUSION_REWRITE=1 python -m pytest tests/test_public_api.py`` writes it anew.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
from tvm import relax
from tvm.relax import pipeline as pipelines

import relax_fusion

from .support.processes import without_torch

RECORDED = Path(__file__).parent / "data" / "public_api.txt"
MODULES = (
    *("relax_fusion", "relax_fusion.algebra", "relax_fusion.canonical"),
    "relax_fusion.dlight_rules",
    *("relax_fusion.frontends", "relax_fusion.hardware", "relax_fusion.mlc"),
    *("relax_fusion.models", "relax_fusion.parallel", "relax_fusion.studio", "relax_fusion.torch"),
    "relax_fusion.triton_bridge",
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


LAZY = """
import sys
import relax_fusion
assert "make_target" in dir(relax_fusion) and not hasattr(relax_fusion, "__wrapped__")
heavy = {"numpy", "pydantic", "torch", "triton", "tvm", "tvm_ffi"}
assert not heavy & {*sys.modules}, heavy & {*sys.modules}
from tvm import relax
assert not {name for name in sys.modules if name.startswith("relax_fusion.p")}
relax.get_pipeline("relax_fusion", target="llvm")
"""


def test_importing_the_package_imports_nothing_else_and_registers_the_pipeline() -> None:
    environment = without_torch()
    done = subprocess.run([sys.executable, "-c", LAZY], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_the_pipeline_is_registered_also_where_tvm_is_imported_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(pipelines.PIPELINE_MAP, "relax_fusion")
    for _ in range(2):
        relax_fusion.registration.register_pipeline()
    assert relax.get_pipeline("relax_fusion", target="llvm").info.name == "relax_fusion"


def test_type_checkers_take_the_names_for_public() -> None:
    for node in ast.walk(ast.parse(Path(relax_fusion.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level and node.module != "registration":
            assert [name.asname for name in node.names] == [name.name for name in node.names]


def test_every_public_name_is_described() -> None:
    without = []
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value):
                without.append(f"{module_name}.{name}")
    assert without == []
