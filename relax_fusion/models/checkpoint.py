"""The safetensors files of a Hugging Face directory, of which tensors or parts are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16", which safetensors asks it for)
import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointFileError, MissingTensorError, TensorShapeError, WeightsError
from ..files import check_regular, read_file
from ..validation import shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
READABLE = ("F64", "F32", "F16", "BF16")

# Checkpoints converted from TensorFlow call the two halves of a LayerNorm by their Greek letters.
_OLD_SUFFIXES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


class Checkpoint:
    """The tensors of a checkpoint by name, read lazily.

    `path`: a directory with ``model.safetensors`` or ``model.safetensors.index.json`` and its
    shards, or one safetensors file.
    `prefix`: what a checkpoint of the bare model leaves out of its names, such as
    ``"transformer."``.
    Raises `CheckpointFileError` if a file is missing, truncated or not a safetensors file.
    """

    def __init__(self, path: str | Path, prefix: str = "") -> None:
        self.path = Path(path)
        self._prefix = prefix
        self._file_of = self._index()
        self._read: set[str] = set()
        self._open_path: Path | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def unread(self) -> list[str]:
        """Names of the tensors that nothing has asked for."""
        return [name for name in self._file_of if name not in self._read]

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        span: tuple[int, int, int] | None = None,
        kinds: tuple[str, ...] = READABLE,
    ) -> np.ndarray:
        """Read one tensor, or a part of it, in the type that it is stored in.

        `name`: its name in a checkpoint of the whole model.
        `shape`: the shape that it must have.
        `span`: an axis, 0 or 1, and where along it the part begins and ends; all of it by default.
        `kinds`: types that it may be stored in, as safetensors calls them.
        Raises `MissingTensorError`, `TensorShapeError` or `WeightsError` if it is not there, has
        another shape, or is quantised or integer.
        """
        stored = self._stored_name(name)
        file = self._file_of[stored]
        try:
            handle = self._handle(file)
            view = handle.get_slice(stored)
            got, kind = tuple(view.get_shape()), view.get_dtype()
            if shape is not None and got != shape:
                raise TensorShapeError(
                    f"{file.name} holds {stored!r} of shape {list(got)}, but the config implies "
                    f"{list(shape)}"
                )
            if kind not in kinds:
                raise WeightsError(
                    f"{file.name} holds {stored!r} as {kind}, which is not supported; "
                    f"readable types: {', '.join(kinds)}"
                )
            value = handle.get_tensor(stored) if span is None else _sliced(view, *span)
        except SafetensorError as err:
            raise CheckpointFileError(f"{file} cannot be read: {err}") from err
        self._read.add(stored)
        return value

    def _stored_name(self, name: str) -> str:
        spellings = [name]
        for new, old in _OLD_SUFFIXES.items():
            if name.endswith(new):
                spellings.append(name.removesuffix(new) + old)
        spellings += [s.removeprefix(self._prefix) for s in spellings]
        for spelling in spellings:
            if spelling in self._file_of:
                return spelling
        raise MissingTensorError(
            f"the tensor {name!r} is in none of the {len(set(self._file_of.values()))} file(s) "
            f"of {self.path}; is this checkpoint of the architecture that config.json names?"
        )

    def _handle(self, file: Path) -> Any:
        # One shard stays mapped at a time; parameters come roughly in the order of the shards.
        if file != self._open_path:
            self._open = _open(file)
            self._open_path = file
        return self._open

    def _index(self) -> dict[str, Path]:
        if self.path.is_file():
            return dict.fromkeys(_open(self.path).keys(), self.path)
        index = self.path / INDEX
        if not index.is_file():
            single = self.path / SINGLE
            return dict.fromkeys(_open(single).keys(), single)
        try:
            shards = json.loads(read_file(index).decode())["weight_map"]
            for shard in shards.values():
                if Path(shard).name != shard or not shard.isprintable():
                    raise ValueError(f"{shown(shard)} is no file of the directory")
            files = {name: self.path / shard for name, shard in shards.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as err:
            raise CheckpointFileError(f"{index} is not a safetensors index: {err!r}") from err
        found = {file: set(_open(file).keys()) for file in sorted(set(files.values()))}
        for name, file in files.items():
            if name not in found[file]:
                raise MissingTensorError(
                    f"{index.name} says that {name!r} is in {file.name}, but it is not"
                )
        return files


def _sliced(view: Any, axis: int, start: int, stop: int) -> np.ndarray:
    return view[start:stop] if axis == 0 else view[:, start:stop]


def _open(file: Path) -> Any:
    try:
        check_regular(file)
        return safe_open(file, framework="numpy")
    except FileNotFoundError as err:
        raise CheckpointFileError(
            f"{file} does not exist; download the missing file into the model directory"
        ) from err
    except (SafetensorError, OSError) as err:
        raise CheckpointFileError(
            f"{file} is truncated or not a safetensors file ({err}); download it again"
        ) from err
