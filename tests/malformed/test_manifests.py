"""What is read of a compiled directory, malformed: each is one line of a typed error."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from relax_fusion.cli import manifest
from relax_fusion.models import ModelError
from relax_fusion.models.checkpoint import INDEX, Checkpoint
from relax_fusion.validation import shown

from ..support.malformed import HUGE, failed

FORGED: list[dict[str, Any]] = [
    *({"files": v} for v in ({}, None, [1, 2], "x", {"lib.so": {}}, {"lib.so": None})),
    *({"files/../../etc/hostname": {"bytes": 1, "sha256": "0" * 64}}, {"files/a": None}),
    *({"files/lib.so": {"bytes": v, "sha256": "0" * 64}} for v in (-1, "9", 9.5, HUGE, True, 9)),
    *({"files/lib.so": {"bytes": 9, "sha256": v}} for v in ("", 3, None, "0" * 63, "G" * 64)),
    *({"functions": v} for v in (None, [], "decode", [3], ["decode"], ["decode", "prefill"])),
    *({"max_seq_len": v} for v in ("64", -5, 0, 100000, 63, 1.5, HUGE, True, None)),
    *({"batch": v} for v in (0, 2, "1", None, 1.5)),
    *({"dtype": v} for v in ("float16", "floatx", 3, None)),
    *({"target": v} for v in ("zzz", "cuda", "h200", [1], None, "", '{"kind": "c"}', "llvm -x")),
    *({"config": v} for v in ([1], None, "x", {}, {"model_type": "gpt2"})),
    *({f"config/{k}": v} for k, v in (("n_embd", 64), ("n_layer", "x"), ("eos_token_id", [[1]]))),
    *({"config/eos_token_id": v} for v in (7, "x", {"a": 1})),
    *({"versions": v} for v in (None, ["a"], {}, {"tvm": "0.27.0"}, {"tvm": 3})),
    *({"versions/tvm": v} for v in (3, "0.1.0", "0.27.999", None)),
    *({"weights": v} for v in ("zzz", "random", "none", None, 3, ["file"])),
    *({"parameters": v} for v in ([1], None, "x", [], [{}])),
    *({"source": v} for v in (3, None, "other")),
    *({"format": v} for v in (True, "4", 3, manifest.FORMAT + 1, None, 2.5, HUGE)),
    *({"signature": v} for v in ("x", [], {}, {"inputs": [], "outputs": []}, {"inputs": 3})),
    {"signature": {"inputs": [], "outputs": [], "sizes": {}}},
    {"surprise": 1},
]


def edited(data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with changes; ``files/name`` is a field of a field."""
    copy = json.loads(json.dumps(data))
    for key, value in changes.items():
        field, _, inner = key.partition("/")
        (copy[field] if inner else copy)[inner or field] = value
    return copy


@pytest.mark.parametrize("changes", [*FORGED, {}], ids=shown)
def test_manifests(compiled, library, tmp_path: Path, capsys, changes: dict[str, Any]) -> None:
    for name in (manifest.LIBRARY, manifest.PARAMS):
        (tmp_path / name).symlink_to(compiled[0] / name)
    (tmp_path / manifest.MANIFEST).write_text(json.dumps(edited(compiled[1], changes)))
    line = failed(["run", str(tmp_path), "--prompt-ids", "1"], capsys)
    assert ("everything is right" in line) == (changes == {})


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "null", '"x"', "\udcff", "[" * 99999])
def test_manifests_that_are_none(tmp_path: Path, capsys, text: str) -> None:
    (tmp_path / manifest.MANIFEST).write_text(text, encoding="utf-8", errors="surrogateescape")
    assert "is damaged" in failed(["run", str(tmp_path), "--prompt-ids", "1"], capsys)


def test_a_library_that_says_nothing(compiled, library, capsys, monkeypatch) -> None:
    for told in ({}, {"_metadata": lambda: "{"}, {"_metadata": lambda: "{}"}):
        monkeypatch.setattr(manifest.relax, "VirtualMachine", lambda *_, told=told: told)
        line = failed(["run", str(compiled[0]), "--prompt-ids", "1"], capsys)
        assert "does not say what it was compiled for" in line


def test_weights_of_types_that_numpy_lacks(compiled, tmp_path: Path) -> None:
    made = manifest.read_manifest(compiled[0])
    header = {}
    for n, p in enumerate(made.parameters):
        header[p.name] = {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [n, n + 1]}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(len(header))
    (tmp_path / manifest.PARAMS).write_bytes(data)
    with pytest.raises(manifest.CliError, match="cannot be read"):
        next(manifest.stored_weights(tmp_path, made))


def spoil(file: Path, kind: str) -> Path:
    """Make a file that cannot be read as a whole."""
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.touch()
        os.truncate(file, 2**42)
    return file


@pytest.mark.parametrize("kind", ["pipe", "huge"])
def test_files_that_cannot_be_read_as_a_whole(tmp_path: Path, kind: str) -> None:
    spoil(tmp_path / manifest.MANIFEST, kind)
    unread = "it is no regular file|it has 4398046511104 bytes"
    with pytest.raises(OSError, match=unread):
        manifest.read_manifest(tmp_path)
    index = tmp_path / INDEX
    if kind == "huge":
        spoil(index, kind)
    else:
        index.write_text(json.dumps({"weight_map": {"a": spoil(tmp_path / "shard", kind).name}}))
    with pytest.raises(ModelError, match=unread):
        Checkpoint(tmp_path)


def test_a_manifest_is_what_was_written(compiled) -> None:
    again = json.loads(json.dumps(asdict(manifest.read_manifest(compiled[0]))))
    assert again == compiled[1]
