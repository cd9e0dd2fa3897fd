"""What ``SRC`` on the command line can be, and what can be taken from it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np

from ..frontends import SUFFIXES, ImportedModel, read_model
from ..frontends.imported import shape_text
from ..hardware.target import device_of, is_gpu
from ..models import Config, ConfigError, ExportedModel, config_from_dict, export, load_weights
from ..models.checkpoint import INDEX, SINGLE
from ..models.config_file import read_config
from ..models.zoo import CONFIGS
from ..validation import shown
from .console import CliError, Console
from .manifest import stored_name
from .model_arguments import asked

DEFAULT_MAX_SEQ_LEN = 4096
"""Caches have at most this many rows by default: those of a model made for 131072 tokens would fill
a machine."""


@dataclass(frozen=True)
class ConfigSource:
    """A model to compile that is built from its configuration."""

    name: str  # a short name for messages and the manifest: no path
    data: Mapping[str, Any]  # the content of its ``config.json``
    config: Config  # the same as a record
    directory: Path | None = None  # where its weights and tokenizer are, if it has them

    @property
    def tokenizer(self) -> Path | None:
        """The file of the tokenizer, if there is one."""
        file = None if self.directory is None else self.directory / "tokenizer.json"
        return file if file is not None and file.is_file() else None

    def check(self, args: argparse.Namespace) -> None:
        """Complain about options that are for other sources."""
        if args.bound:
            raise CliError(
                f"--bound is for models from {' and '.join(SUFFIXES)} files; {self.name} takes "
                "--max-seq-len and --batch",
                code=2,
            )

    def require_weights(self) -> None:
        """Complain, before anything is compiled, about a directory without weights."""
        directory = self.directory
        if directory and not any((directory / name).is_file() for name in (SINGLE, INDEX)):
            raise CliError(
                f"{directory} has no {SINGLE} and no {INDEX}; download the weights, pass "
                f"--no-weights, or give {directory / 'config.json'} to run with random ones"
            )

    def model(self, args: argparse.Namespace) -> ExportedModel:
        """Build the model, choosing the type and the length that were left open."""
        usual = "float16" if is_gpu(args.target) else "float32"
        return export(
            self.config,
            dtype=args.dtype or (None if args.quantization else usual),
            quantization=args.quantization,
            max_seq_len=args.max_seq_len or min(self.config.max_position, DEFAULT_MAX_SEQ_LEN),
            batch=args.batch or 1,
            shards=args.tensor_parallel or 1,
        )

    def kept(self, model: Any) -> dict[str, Any]:
        """Return what the manifest keeps, so that the model can be described again."""
        return {
            "config": dict(self.data),
            "max_seq_len": model.max_seq_len,
            "batch": model.batch,
            "quantization": model.quantization,
            "shards": model.shards,
            "weights": "random" if self.directory is None else "file",
        }

    def weights(self, model: Any) -> Mapping[str, np.ndarray]:
        """Read the weights, of all workers."""
        assert self.directory is not None, "weights of a configuration alone are random"
        found: dict[str, np.ndarray] = {}
        for rank in range(model.shards):
            names = [stored_name(param.name, rank, model.shards) for param in model.params]
            found |= zip(names, load_weights(self.directory, model, rank), strict=True)
        return found


@dataclass(frozen=True)
class FileSource:
    """A model to compile that is imported from a file, by whose name it goes."""

    name: str
    path: Path
    tokenizer: ClassVar[None] = None

    def check(self, args: argparse.Namespace) -> None:
        """Complain about options that are for other sources."""
        for option in ("dtype", "max_seq_len", "batch", "quantization", "tensor_parallel"):
            if getattr(args, option) is not None:
                raise CliError(
                    f"--{option.replace('_', '-')} is for models from a configuration; "
                    f"{self.path} has types and sizes of its own, and takes --bound",
                    code=2,
                )

    def require_weights(self) -> None:
        """Nothing is required: they are in the file."""

    def model(self, args: argparse.Namespace) -> ImportedModel:
        """Import the model, with the bounds of its sizes that were given."""
        model = read_model(self.path)
        sizes = dict(model.signature.sizes)
        for name, bound in args.bound:
            if name not in sizes:
                known = ", ".join(sizes) or "none"
                raise CliError(
                    f"--bound names {shown(name)}, which is no size of {self.path}; it has {known}",
                    code=2,
                )
            least, most = sizes[name]
            if bound < least or (most is not None and bound > most):
                limit = f"{least} to {most}" if most is not None else f"{least} on"
                raise CliError(
                    f"--bound {name}={bound}: {self.path} was exported for {name} from {limit}",
                    code=2,
                )
            sizes[name] = (least, bound)
        return replace(model, signature=replace(model.signature, sizes=sizes))

    def kept(self, model: Any) -> dict[str, Any]:
        """Return what the manifest keeps besides the signature."""
        return {"weights": "file"}

    def weights(self, model: Any) -> Mapping[str, np.ndarray]:
        """Return the weights."""
        return model.weights


Source: TypeAlias = ConfigSource | FileSource
Model: TypeAlias = ExportedModel | ImportedModel


def described(model: Model) -> str:
    """Say of what type and sizes a model is."""
    if isinstance(model, ExportedModel):
        stored = f"{model.quantization}, " if model.quantization else ""
        spread = f", {model.shards} workers" if model.shards > 1 else ""
        return f"{stored}{model.dtype}, batch {model.batch}{spread}"
    inputs = ", ".join(f"{spec.name} {shape_text(spec.shape)}" for spec in model.signature.inputs)
    return f"{model.dtype}, {inputs}" if inputs else model.dtype


def facts_of(name: str, model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Return what a report says of a compilation besides what was decided."""
    sizes = ("quantization", "max_seq_len", "batch")
    return {
        "source": name,
        "target": str(args.target),
        "device": device_of(args.target).description,
        "dtype": model.dtype,
        **{each: getattr(model, each, None) for each in sizes},
        "options": asked(args),
    }


def bounds(model: Model) -> dict[str, int]:
    """Return how large sizes can become, where a file or the command line says so."""
    if isinstance(model, ExportedModel):
        return {}
    return {name: most for name, (_, most) in model.signature.sizes.items() if most}


def longest(model: Model) -> dict[str, int]:
    """Return how large sizes become that a module has no bounds for: tokens and context."""
    if not isinstance(model, ExportedModel):
        return {}
    return dict.fromkeys(("seq_len", "total_len"), model.max_seq_len)


def open_source(text: str) -> Source:
    """Find out what `text` means: a directory, a file, or the name of a bundled configuration.

    Raises `CliError` or `ModelError` if it is none of them, or its configuration cannot be used.
    """
    path = Path(text)
    suffix = path.suffix.lower()
    if suffix in SUFFIXES and not path.is_dir():
        path.stat()
        return FileSource(os.fsencode(path.stem).decode(errors="replace"), path)
    if path.exists():
        data = _config_of(path)
        name = (path if path.is_dir() else path.parent).resolve().name
        name = os.fsencode(name).decode(errors="replace")  # names of files need not be text
        return ConfigSource(name, data, config_from_dict(data), path if path.is_dir() else None)
    if text in CONFIGS:
        return ConfigSource(text, CONFIGS[text], config_from_dict(CONFIGS[text]))
    raise CliError(
        f"{text!r} is neither a directory, a config.json, a file in {' or '.join(SUFFIXES)}, nor a "
        f"bundled configuration ({', '.join(CONFIGS)})"
    )


def exported_source(
    args: argparse.Namespace, console: Console, *, weights: bool = False
) -> tuple[Source, Model]:
    """Open ``args.source`` and export its model; `weights` says whether it has to have some."""
    source = open_source(args.source)
    source.check(args)
    if weights:
        source.require_weights()
    console.step(f"exporting {source.name}")
    return source, source.model(args)


def _config_of(path: Path) -> dict[str, Any]:
    """Read a configuration; what else the file could have been meant to be is told."""
    try:
        return read_config(path)
    except ConfigError as err:
        if path.is_dir() or path.suffix.lower() in ("", ".json"):
            raise
        hint = f"files of models end in {' or '.join(SUFFIXES)}, configurations in .json"
        raise CliError(f"{err}; {hint}") from err
