"""The directory that ``compile`` makes and ``run`` reads: lib.so, weights and a manifest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from safetensors import SafetensorError, safe_open

from .. import __version__
from ..models import ExportedModel, config_from_dict, export
from .console import CliError

LIBRARY = "lib.so"
PARAMS = "params.safetensors"
TOKENIZER = "tokenizer.json"
MANIFEST = "manifest.json"
FORMAT = 1
"""Raised when an older `run` could not read what `compile` writes."""


@dataclass(frozen=True)
class Manifest:
    """What a compiled directory holds.

    Parameters
    ----------
    source : str
        Name of the model.
    config : mapping
        The content of its ``config.json``.
    dtype, max_seq_len, batch
        As it was exported.
    target : str
        The TVM target, as JSON.
    functions : list of str
        What can be called in the library.
    parameters : list of mapping
        Name, shape and type of each weight, in the order in which the functions take them.
    weights : {"file", "random", "none"}
        Whether they are in the directory, are to be made up, or were left out.
    versions : mapping
        Of this package and of TVM.
    files : mapping
        Size in bytes and SHA-256 of every other file.
    format : int
        Version of this record.
    """

    source: str
    config: Mapping[str, Any]
    dtype: str
    max_seq_len: int
    batch: int
    target: str
    functions: list[str]
    parameters: list[Mapping[str, Any]]
    weights: str
    versions: Mapping[str, str]
    files: Mapping[str, Mapping[str, Any]]
    format: int = FORMAT


def versions() -> dict[str, str]:
    """Return the versions that decide whether a library can be loaded."""
    return {"relax_fusion": __version__, "tvm": tvm.__version__}


def parameters(exported: ExportedModel) -> list[Mapping[str, Any]]:
    """Describe the weights of a model, in order."""
    return [{"name": p.name, "shape": list(p.shape), "dtype": p.dtype} for p in exported.params]


def check_output(out: Path, *, force: bool) -> None:
    """Refuse, before anything is compiled, to write where something else is."""
    if not out.exists():
        return
    ours = out.is_dir() and ((out / MANIFEST).is_file() or not any(out.iterdir()))
    if force and ours:
        return
    what = "pass --force to replace it" if ours else "it is not a directory that compile made"
    raise CliError(f"{out} exists already; {what}, or choose another -o", code=2)


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Give a directory to fill; it becomes `out` at the end, or vanishes if anything fails."""
    out.parent.mkdir(parents=True, exist_ok=True)
    stage = out.parent / f".{out.name}.{os.getpid()}.part"
    stage.mkdir()
    try:
        yield stage
        if out.exists():  # the caller has checked that it may be replaced
            old = stage.with_suffix(".old")
            out.rename(old)
            stage.rename(out)
            shutil.rmtree(old)
        else:
            stage.rename(out)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest; it is the last file, for it has the others' sums."""
    text = json.dumps(asdict(manifest), indent=2)
    (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")


def file_sums(directory: Path) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of every file in `directory`."""
    return {
        file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(directory.iterdir())
    }


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a compiled directory.

    Raises
    ------
    CliError
        If it is missing, damaged, or of a version that this one cannot run.
    """
    file = directory / MANIFEST
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        found = data.get("format") if isinstance(data, dict) else None
        if isinstance(found, int) and found != FORMAT:
            raise CliError(f"{file} has format {found}, this version reads {FORMAT}; compile again")
        return Manifest(**data)
    except FileNotFoundError as err:
        raise CliError(
            f"{directory} has no {MANIFEST}; give a directory that `relax-fusion compile` made"
        ) from err
    except (ValueError, TypeError) as err:
        raise CliError(f"{file} is damaged ({err}); compile the model again") from err


def check_files(directory: Path, manifest: Manifest) -> None:
    """Compare the files with the manifest, because loading half a library ends the process.

    The weights, which can take minutes to read, are compared by size only; their own reader
    notices the rest.
    """
    for name, entry in manifest.files.items():
        file = directory / name
        if not file.is_file():
            raise CliError(f"{file} is missing; compile the model again")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise CliError(
                f"{file} has {size} bytes, its manifest says {entry['bytes']}: it was cut short or "
                "changed; copy it or compile the model again"
            )
        if name != PARAMS and _sha256(file) != entry["sha256"]:
            raise CliError(f"{file} is not what compile wrote (SHA-256 differs); compile again")


def exported_again(manifest: Manifest) -> ExportedModel:
    """Rebuild the description of the model that the library was compiled from."""
    exported = export(
        config_from_dict(manifest.config),
        dtype=manifest.dtype,
        max_seq_len=manifest.max_seq_len,
        batch=manifest.batch,
    )
    if parameters(exported) != manifest.parameters:
        made = manifest.versions.get("relax_fusion")
        raise CliError(
            f"the library takes other parameters than this version ({__version__}) would give it; "
            f"it was compiled by {made}: compile again"
        )
    return exported


def stored_weights(directory: Path, manifest: Manifest) -> Iterator[np.ndarray]:
    """Read the weights one at a time, in the order in which the functions take them."""
    file = directory / PARAMS
    try:
        with safe_open(file, framework="numpy") as handle:
            for param in manifest.parameters:
                yield handle.get_tensor(param["name"])
    except SafetensorError as err:
        raise CliError(f"{file} cannot be read ({err}); compile the model again") from err
