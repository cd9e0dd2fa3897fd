"""Triton's interpreter; and less than compiling, for tests that ask for less."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.interpreted import Interpreter
from . import common


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take kernels for compiled: enough where a test asks what is launched, and how."""
    monkeypatch.setattr("relax_fusion.triton_bridge.emit.compile_kernels", common.not_compiled)


@pytest.fixture
def without_ptxas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compile as far as PTX, where shared memory is known: ptxas takes half of the time."""
    monkeypatch.setenv("RELAX_FUSION_CACHE_DIR", str(tmp_path))  # nobody else shall find these
    monkeypatch.setattr("triton.backends.nvidia.compiler.CUDABackend.make_cubin", lambda *_: b"")
    monkeypatch.setattr("relax_fusion.triton_bridge.compile.check_entry", lambda _: None)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """A process of its own; it takes seconds to start."""
    worker = Interpreter()
    yield worker
    worker.close()
