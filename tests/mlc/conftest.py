"""A package that stands for MLC-LLM, imported anew in every test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tvm.relax.pipeline import PIPELINE_MAP

from relax_fusion.mlc import uninstall

STUB = Path(__file__).parents[1] / "support" / "mlc"


def forget() -> None:
    """Remove every trace of the package."""
    uninstall()
    PIPELINE_MAP.pop("mlc_llm", None)
    for name in [n for n in sys.modules if n.partition(".")[0] == "mlc_llm"]:
        del sys.modules[name]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    forget()
    monkeypatch.delenv("MLC_LIBRARY_PATH", raising=False)
    monkeypatch.syspath_prepend(str(STUB))
    yield STUB
    forget()
