"""What a compiled directory holds: its record, the files that it names, and the library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import tvm
from pydantic import Field
from safetensors import SafetensorError, safe_open
from tvm import relax

from .. import __version__
from ..files import read_file, write_file
from ..frontends import ImportedModel, Signature, TensorSpec
from ..models import BertConfig, ExportedModel, config_from_dict, export
from ..models.export import LENGTH
from ..validation import Count, Natural, read_json, shown
from .console import FOREIGN_ERRORS, CliError

LIBRARY = "lib.so"
PARAMS = "params.safetensors"
TOKENIZER = "tokenizer.json"
MANIFEST = "manifest.json"
FileName = Literal["lib.so", "params.safetensors", "tokenizer.json", "report.json"]
FORMAT = 7
"""The number of the manifest's format; it rises when an older `run` could not read what `compile`
writes."""

Weights = Literal["file", "random", "none"]

_METADATA = "relax_fusion"


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and SHA-256 of one file."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Parameter:
    """Name, shape and type of one weight."""

    name: str
    shape: tuple[Natural, ...]
    dtype: str


@dataclass(frozen=True)
class Versions:
    """The versions that decide whether a library can be loaded."""

    relax_fusion: str
    tvm: str


@dataclass(frozen=True)
class Compiled:
    """What a library was compiled from and for; it carries this itself."""

    source: str  # name of the model
    dtype: str  # of its activations, and of weights that are not quantised
    target: str  # of TVM, as JSON
    functions: tuple[str, ...]  # what can be called in the library
    weights: Weights  # whether they are in the directory, are to be made up, or were left out
    versions: Versions  # of this package and of TVM
    config: dict[str, Any] | None = None  # its ``config.json``, where it was built from one
    max_seq_len: Count | None = None
    batch: Count | None = None
    """As it was exported, where it was built from a configuration."""
    signature: Signature | None = None  # None where it generates text
    quantization: str | None = None  # how its weights are stored
    shards: Count = 1  # over how many workers it is spread

    def to_metadata(self) -> dict[str, str]:
        """Return the ``metadata`` with which the pipeline puts this into the library."""
        return {_METADATA: json.dumps(asdict(self))}


@dataclass(frozen=True, kw_only=True)
class Manifest(Compiled):
    """What a compiled directory holds."""

    parameters: tuple[Parameter, ...]  # the weights, in the order in which the functions take them
    files: dict[FileName, FileSum]  # every other file
    format: Literal[7] = 7  # version of this record


def versions() -> Versions:
    """Return the versions of this process."""
    return Versions(__version__, tvm.__version__)


def signature_of(model: ExportedModel | ImportedModel) -> Signature | None:
    """Say what the function of a model takes and returns; None if it generates text."""
    if isinstance(model, ImportedModel):
        return model.signature
    if not isinstance(model.config, BertConfig):
        return None
    shape = (model.batch, LENGTH)
    inputs = ("input_ids", "token_type_ids", "attention_mask")
    wide = (model.config.vocab_size if model.config.masked_lm else model.config.hidden_size,)
    name = "logits" if model.config.masked_lm else "hidden_states"
    return Signature(
        tuple(TensorSpec(name, shape, "int32") for name in inputs),
        (TensorSpec(name, shape + wide, "float32"),),
        {LENGTH: (1, model.max_seq_len)},
    )


def parameters(model: ExportedModel | ImportedModel) -> tuple[Parameter, ...]:
    """Describe the weights of a model, in order."""
    if isinstance(model, ImportedModel):
        return tuple(Parameter(n, a.shape, str(a.dtype)) for n, a in model.weights.items())
    return tuple(Parameter(p.name, p.shape, p.dtype) for p in model.params)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest; it is the last file, for it has the others' sums."""
    text = json.dumps(asdict(manifest), indent=2)
    write_file(directory / MANIFEST, text + "\n")


def file_sums(directory: Path) -> dict[FileName, FileSum]:
    """Return size and SHA-256 of every file in `directory`."""
    names: tuple[FileName, ...] = get_args(FileName)
    files = {name: directory / name for name in names if (directory / name).exists()}
    return {name: FileSum(f.stat().st_size, _sha256(f)) for name, f in files.items()}


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a compiled directory.

    Raises `CliError` if it is missing, damaged, or of a version that this one cannot run.  Raises
    `OSError` if it cannot be read.
    """
    file = directory / MANIFEST
    try:
        text = read_file(file)
    except (FileNotFoundError, NotADirectoryError) as err:
        what = f"has no {MANIFEST}" if directory.is_dir() else "is no directory"
        raise CliError(
            f"{directory} {what if directory.exists() else 'does not exist'}; give a directory "
            "that `relax-fusion compile` made"
        ) from err
    try:
        found = json.loads(text).get("format")
    except (ValueError, AttributeError, RecursionError) as err:
        raise CliError(f"{file} is damaged: it is no JSON object; compile again") from err
    if type(found) is int and found != FORMAT:
        raise CliError(f"{file} has format {found}, this version reads {FORMAT}; compile again")
    manifest = read_json(Manifest, text, CliError, f"{file} is damaged")
    for name, needed in ((LIBRARY, True), (PARAMS, manifest.weights == "file")):
        if (name in manifest.files) != needed:
            word = "lacks" if needed else "has"
            raise CliError(
                f"{file} is damaged: weights is {manifest.weights!r}, but files {word} {name}"
            )
    return manifest


def check_files(directory: Path, manifest: Manifest, *, also_weights: bool = False) -> None:
    """Compare the files with the manifest, because loading half a library ends the process.

    The weights can take minutes to read: unless `also_weights`, only their size is compared.
    """
    for name, entry in manifest.files.items():
        file = directory / name
        if not file.is_file():
            raise CliError(f"{file} is missing; compile the model again")
        size = file.stat().st_size
        if size != entry.bytes:
            raise CliError(
                f"{file} has {size} bytes, its manifest says {entry.bytes}: it was cut short or "
                "changed; copy it or compile the model again"
            )
        if (also_weights or name != PARAMS) and _sha256(file) != entry.sha256:
            raise CliError(f"{file} is not what compile wrote (SHA-256 differs); compile again")


def check_library(library: tvm.runtime.Module, manifest: Manifest, file: Path) -> None:
    """Compare the manifest with what the library says of itself, for anybody can edit a manifest.

    Raises `CliError` if they differ; it names the field.
    """
    try:
        metadata = relax.VirtualMachine(library, tvm.cpu())["_metadata"]()
        inside = json.loads(json.loads(str(metadata))[_METADATA])
        # As text, because a configuration may hold NaN, which differs from itself
        told = {
            field.name: json.dumps(inside[field.name], sort_keys=True) for field in fields(Compiled)
        }
    except FOREIGN_ERRORS as err:
        raise CliError(f"{file} does not say what it was compiled for; compile again") from err
    said = asdict(manifest)
    for name, value in told.items():
        if json.dumps(said[name], sort_keys=True) != value:
            raise CliError(
                f"{MANIFEST} has {name} {shown(said[name])}, but {file} was compiled with "
                f"{shown(json.loads(value))}; compile again"
            )


def exported_again(manifest: Manifest) -> ExportedModel:
    """Rebuild the description of the model that the library was compiled from."""
    if manifest.config is None or manifest.batch is None:
        raise CliError(f"{MANIFEST} is damaged: it has no config of {manifest.source}")
    exported = export(
        config_from_dict(manifest.config),
        dtype=manifest.dtype,
        max_seq_len=manifest.max_seq_len,
        batch=manifest.batch,
        quantization=manifest.quantization,
        shards=manifest.shards,
    )
    if parameters(exported) != manifest.parameters:
        raise CliError(
            f"the library takes other parameters than this version ({__version__}) would give it; "
            f"it was compiled by {manifest.versions.relax_fusion}: compile again"
        )
    return exported


def stored_name(name: str, rank: int, shards: int) -> str:
    """Return what a parameter of a worker is called in the file of weights."""
    return name if shards == 1 else f"{rank}/{name}"


def stored_weights(directory: Path, manifest: Manifest, rank: int = 0) -> Iterator[np.ndarray]:
    """Read the weights of a worker one at a time, in the order in which the functions take them."""
    file = directory / PARAMS
    try:
        with safe_open(file, framework="numpy") as handle:
            for param in manifest.parameters:
                yield handle.get_tensor(stored_name(param.name, rank, manifest.shards))
    except (SafetensorError, AttributeError) as err:  # the second: of a type that NumPy lacks
        raise CliError(f"{file} cannot be read ({err}); compile the model again") from err
