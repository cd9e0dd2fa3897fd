"""Every block of code of the documents runs, and does what the page says around it."""

from __future__ import annotations

import re
import runpy
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_fusion.hardware import target
from relax_fusion.models import zoo

from .support.code_blocks import ROOT, RUN, SHOWN, blocks_of, program_of, run_program, runner
from .support.processes import without_torch

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if "experiments" not in p.parts),
]
NAMES = {page: str(page.relative_to(ROOT)) for page in PAGES}
RUNNING = [p for p in PAGES if any(b.language in RUN and not b.needs for b in blocks_of(p))]
LONG = ("docs/usage.md", "docs/report.md", "docs/quickstart.md", "docs/pytorch.md")
LONG += ("docs/tuning.md", "docs/chains.md", "docs/parallel.md")
"""Pages that are slow tests; of those that see PyTorch, the README is a quick one."""
TORCH = ("README.md", "docs/pytorch.md")
"""Pages whose programs see PyTorch: they run in this process, which has imported it."""
NEEDED = {
    ("README.md", "network"): 2,
    ("CONTRIBUTING.md", "network"): 1,
    ("CONTRIBUTING.md", "an NVIDIA GPU"): 1,
    ("docs/install.md", "network"): 2,
    ("docs/mlc.md", "MLC-LLM"): 6,
    ("docs/parallel.md", "network"): 1,
    ("docs/results.md", "an NVIDIA GPU"): 1,
    ("docs/standalone.md", "a C++ compiler"): 1,
    ("docs/tuning.md", "a checkpoint"): 1,
    ("docs/tuning.md", "an NVIDIA GPU"): 1,
    ("docs/writing_a_device.md", "minutes"): 1,
}
"""What does not run here, by page and by what it needs."""


@pytest.fixture(scope="module")
def without_pytorch(shared: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a runner of programs that do not see PyTorch."""
    variables = without_torch(RELAX_FUSION_CACHE_DIR=str(shared / "documented-kernels"))
    with runner({**variables, "PYTHONPATH": f"{variables['PYTHONPATH']}:{ROOT}"}) as process:
        yield process


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.slow) if NAMES[p] in LONG else p for p in RUNNING],
    ids=NAMES.get,
)
def test_a_page_runs(
    page: Path, tmp_path: Path, without_pytorch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / page.with_suffix(".py").name
    program.write_text(program_of(page), encoding="utf-8")
    if NAMES[page] in TORCH:
        for module, name in ((target, "host_target"), (zoo, "CONFIGS")):
            monkeypatch.setattr(module, name, getattr(module, name))  # the program sets it
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(program), run_name="__main__")
        return
    code, out, err = run_program(without_pytorch, program)
    assert code == 0, f"{NAMES[page]}\n{out[-2000:]}\n{err[-4000:]}"
    if page.name == "what_is_fused.md":
        named = re.findall(r"fuse_\w+?_[0-9a-f]{8}_", page.read_text(encoding="utf-8"))
        assert len(named) == 2 and [name for name in named if name not in out] == []
    if page.name == "writing_a_kernel.md":
        assert b"launch_axpy_" in (tmp_path / "axpy.so").read_bytes()
        assert len(blocks_of(page)[0].code) <= 15


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_each_block_has_a_language_that_is_run_or_shown(page: Path) -> None:
    known = (*RUN, *SHOWN)
    odd = [f"{NAMES[page]}:{b.line}" for b in blocks_of(page) if b.language not in known]
    assert odd == [], f"languages are {', '.join(known)}"


def test_what_does_not_run_is_known() -> None:
    found = Counter((NAMES[p], b.needs) for p in PAGES for b in blocks_of(p) if b.needs)
    assert dict(found) == NEEDED
