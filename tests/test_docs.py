"""The documents name files that exist, and every public name; the imports are those of today."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .test_public_api import MODULES

ROOT = Path(__file__).parents[1]
PAGES = {"CONTRIBUTING.md": ROOT, "docs/architecture.md": ROOT / "relax_fusion"}


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/.]+(?:/|\.py|\.md))`", text))
    assert len(named) > 8
    assert [
        n for n in sorted(named) if not any((r / n).exists() for r in (ROOT, PAGES[page]))
    ] == []


def test_the_picture_is_of_todays_imports() -> None:
    command = [sys.executable, ROOT / "scripts" / "draw_imports.py", "--check"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_every_public_name_is_on_a_page_of_the_site() -> None:
    pages = [p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "api").glob("*.md")]
    shown = re.findall(r"^::: (\S+)$", "".join(pages), re.MULTILINE)
    assert len(shown) == len(set(shown))
    modules = [importlib.import_module(name) for name in MODULES]
    values = {f"{m.__name__}.{n}": getattr(m, n) for m in modules for n in m.__all__}
    assert set(shown) <= set(values)
    missing = set(values) - set(shown)
    assert [n for n in missing if not any(values[n] is values[s] for s in shown)] == []
