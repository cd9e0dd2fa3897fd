"""Triton's interpreter; and less than compiling, for tests that ask for less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..support.interpreted import Interpreter
from . import common


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take kernels for compiled: enough where a test asks what is launched, and how."""
    monkeypatch.setattr("relax_fusion.triton_bridge.emit.try_kernels", common.not_compiled)


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compile as far as LLVM, where shared memory is known: the rest takes most of the time."""

    def make_ptx(_backend: Any, _source: Any, metadata: dict[str, Any], *_: Any) -> str:
        metadata["name"] = "kernel"
        return ""

    compiler = "triton.backends.nvidia.compiler"
    monkeypatch.setenv("RELAX_FUSION_CACHE_DIR", str(tmp_path))  # nobody else shall find these
    monkeypatch.setattr(f"{compiler}.llvm.optimize_module", lambda *_: None)
    monkeypatch.setattr(f"{compiler}.CUDABackend.make_ptx", make_ptx)
    monkeypatch.setattr(f"{compiler}.CUDABackend.make_cubin", lambda *_: b"")
    monkeypatch.setattr("relax_fusion.triton_bridge.compile.check_entry", lambda _: None)


@pytest.fixture(scope="session")
def interpreter() -> Interpreter:
    """A process of its own."""
    return Interpreter()
