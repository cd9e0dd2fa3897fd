"""A program of the documents does what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from .support.processes import without_torch

PAGE = Path(__file__).resolve().parent.parent / "docs" / "writing_a_kernel.md"


def _program(name: str) -> str:
    """Return the one Python block of the page that defines `name`."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [b for b in blocks if f"def {name}(" in b]
    return block


def test_a_kernel_of_your_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RELAX_FUSION_CACHE_DIR", str(tmp_path / "cache"))
    program = _program("axpy")
    assert len(program.splitlines()) <= 15
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "program.py"]
    subprocess.run(command, cwd=tmp_path, env=without_torch(), check=True)
    assert b"launch_axpy_" in (tmp_path / "axpy.so").read_bytes()
    assert len(list((tmp_path / "cache").glob("*.kernel"))) == 1
