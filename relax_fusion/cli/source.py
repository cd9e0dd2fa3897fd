"""What ``SRC`` on the command line can be, and what can be taken from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm.target import Target

from ..hardware.target import is_gpu
from ..models import Config, ExportedModel, config_from_dict, export
from ..models.checkpoint import INDEX, SINGLE
from ..models.config import read_config
from ..models.zoo import CONFIGS
from .console import CliError

ZOO = tuple(CONFIGS)
"""The names of the bundled configurations."""

DEFAULT_MAX_SEQ_LEN = 4096
"""Rows of the caches by default: those of a model made for 131072 tokens would fill a machine."""


@dataclass(frozen=True)
class Source:
    """A model to compile.

    Parameters
    ----------
    name : str
        A short name for messages and the manifest: no path.
    data : mapping
        The content of its ``config.json``.
    config : Config
        The same as a record.
    directory : Path, optional
        Where its weights and tokenizer are, if it has them.
    """

    name: str
    data: Mapping[str, Any]
    config: Config
    directory: Path | None = None

    @property
    def tokenizer(self) -> Path | None:
        """The file of the tokenizer, if there is one."""
        file = None if self.directory is None else self.directory / "tokenizer.json"
        return file if file is not None and file.is_file() else None

    def require_weights(self) -> None:
        """Complain, before anything is compiled, about a directory without weights."""
        directory = self.directory
        if directory and not any((directory / name).is_file() for name in (SINGLE, INDEX)):
            raise CliError(
                f"{directory} has no {SINGLE} and no {INDEX}; download the weights, pass "
                f"--no-weights, or give {directory / 'config.json'} to run with random ones"
            )


def open_source(text: str) -> Source:
    """Find out what `text` means: a directory, a ``config.json``, or a bundled name.

    Raises
    ------
    CliError, ModelError
        If it is none of them, or its configuration cannot be used.
    """
    path = Path(text)
    if path.exists():
        data = read_config(path)
        name = (path if path.is_dir() else path.parent).resolve().name
        name = os.fsencode(name).decode(errors="replace")  # names of files need not be text
        return Source(name, data, config_from_dict(data), path if path.is_dir() else None)
    if text in CONFIGS:
        return Source(text, CONFIGS[text], config_from_dict(CONFIGS[text]))
    raise CliError(
        f"{text!r} is neither a directory, a config.json, nor a bundled configuration "
        f"({', '.join(ZOO)})"
    )


def export_for(
    config: Config, target: Target, dtype: str | None, max_seq_len: int | None, batch: int
) -> ExportedModel:
    """Export a configuration, choosing the type and the length that were left open."""
    return export(
        config,
        dtype=dtype or ("float16" if is_gpu(target) else "float32"),
        max_seq_len=max_seq_len or min(config.max_position, DEFAULT_MAX_SEQ_LEN),
        batch=batch,
    )
