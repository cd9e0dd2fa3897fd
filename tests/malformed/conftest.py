"""What a compilation leaves, without compiling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from relax_fusion import host_target
from relax_fusion.cli import manifest, run
from relax_fusion.models import config_from_dict, export, random_weights

from ..support.malformed import CONFIG, reached

COMPILED = tuple(manifest.Compiled.__dataclass_fields__)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A directory such as ``compile`` makes, and the content of its manifest."""
    out = tmp_path_factory.mktemp("out")
    exported = export(config_from_dict(CONFIG))
    names = [param.name for param in exported.params]
    weights = dict(zip(names, random_weights(exported), strict=True))
    save_file(weights, out / manifest.PARAMS)
    (out / manifest.LIBRARY).write_bytes(b"a library")
    made = manifest.Manifest(
        source="tiny",
        config=CONFIG,
        dtype=exported.dtype,
        max_seq_len=64,
        batch=1,
        target=str(host_target()),
        functions=exported.functions,
        weights="file",
        versions=manifest.versions(),
        parameters=manifest.parameters(exported),
        files=manifest.file_sums(out),
    )
    manifest.write_manifest(out, made)
    return out, json.loads((out / manifest.MANIFEST).read_text())


@pytest.fixture
def library(compiled: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The library says what the manifest does, and the model is never run."""
    inside = manifest.read_manifest(compiled[0])
    told = manifest.Compiled(**{name: getattr(inside, name) for name in COMPILED})
    monkeypatch.setattr(run.tvm.runtime, "load_module", lambda _: None)
    made = {"_metadata": lambda: json.dumps(told.to_metadata())}
    monkeypatch.setattr(manifest.relax, "VirtualMachine", lambda *_: made)
    monkeypatch.setattr(run, "Generator", lambda *_, **__: reached())
