"""The documents name files that exist, and the picture of the imports is that of today."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
