"""From a checkpoint, or from a random seed, to the arrays that an exported model takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16", which safetensors asks it for)
import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import (
    CheckpointFileError,
    MissingTensorError,
    QuantizationError,
    TensorShapeError,
    WeightsError,
    warn,
)
from ..files import check_regular, read_file
from ..quantization import pack
from ..validation import shown
from .export import ExportedModel, ParamSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
READABLE = ("F64", "F32", "F16", "BF16")

# Checkpoints converted from TensorFlow call the two halves of a LayerNorm by their Greek letters.
_OLD_SUFFIXES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


class Checkpoint:
    """The tensors of a checkpoint by name, read lazily.

    Parameters
    ----------
    path : str or Path
        A directory with ``model.safetensors`` or ``model.safetensors.index.json`` and its shards,
        or one safetensors file.
    prefix : str
        What a checkpoint of the bare model leaves out of its names, such as ``"transformer."``.

    Raises
    ------
    CheckpointFileError
        If a file is missing, truncated or not a safetensors file.
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

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Read one tensor, in the type that it is stored in.

        Parameters
        ----------
        name : str
            Its name in a checkpoint of the whole model.
        shape : tuple[int, ...], optional
            The shape that it must have.

        Raises
        ------
        MissingTensorError, TensorShapeError, WeightsError
            If it is not there, has another shape, or is quantised or integer.
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
            if kind not in READABLE:
                raise WeightsError(
                    f"{file.name} holds {stored!r} as {kind}, which is not supported; "
                    f"readable types: {', '.join(READABLE)}"
                )
            value = handle.get_tensor(stored)
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


# The name that a checkpoint of the bare model (without its head) leaves out.
_BASE_PREFIX = {"llama": "", "gpt2": "transformer.", "bert": "bert."}

# Tensors that checkpoints carry and no inference needs: causal-mask and position buffers saved by
# old versions of transformers, the pooler and next-sentence head of BERT, and copies of tied
# embeddings.
_HARMLESS = {
    "llama": (r"\.rotary_emb\.inv_freq$",),
    "gpt2": (r"\.attn\.(masked_)?bias$",),
    "bert": (
        r"\.position_ids$",
        r"(^|\.)pooler\.",
        r"^cls\.seq_relationship\.",
        r"^cls\.predictions\.decoder\.",
    ),
}


_BLOCK = 1 << 20


class UnusedTensorsWarning(UserWarning):
    """A checkpoint holds tensors that the model does not use."""


class NotFiniteWarning(UserWarning):
    """Weights, or the logits of a model, hold NaN or infinities."""


def load_weights(path: str | Path, exported: ExportedModel) -> list[np.ndarray]:
    """Read the parameters of a model from a Hugging Face directory.

    Parameters
    ----------
    path : str or Path
        A directory with ``model.safetensors``, or an index and its shards; or one such file.
    exported : ExportedModel
        Says which parameters, in which order, shape and type.

    Returns
    -------
    list[numpy.ndarray]
        One array for each of ``exported.params``. Tensors are read, converted and quantised one at
        a time, so the peak is the result and the largest single weight.

    Raises
    ------
    WeightsError
        If a file is missing or damaged, or a tensor is missing, of another shape, or beyond the
        range of the exported type.

    Warns
    -----
    UnusedTensorsWarning
        If tensors are left over that are not known to be harmless.
    NotFiniteWarning
        If weights are NaN or infinite.
    """
    family = exported.config.family
    checkpoint = Checkpoint(path, _BASE_PREFIX[family])
    arrays = list(_stored(exported.params, lambda param: _load(param, checkpoint)))
    patterns = list(_HARMLESS[family])
    if getattr(exported.config, "tie_word_embeddings", False):
        patterns.append(r"^lm_head\.weight$")
    if not getattr(exported.config, "masked_lm", True):
        patterns.append(r"^cls\.")
    unused = [n for n in checkpoint.unread() if not any(re.search(p, n) for p in patterns)]
    if unused:
        text = f"{path} holds {len(unused)} tensor(s) that the model does not use: {_some(unused)}"
        warn(text, UnusedTensorsWarning)
    pairs = zip(exported.params, arrays, strict=True)
    wrong = [param.name for param, array in pairs if not _is_finite(array)]
    if wrong:
        text = f"{path} holds NaN or infinities in {len(wrong)} weight(s): {_some(wrong)}"
        warn(text, NotFiniteWarning)
    return arrays


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _is_finite(array: np.ndarray) -> bool:
    """Tell whether no element is NaN or infinite; in blocks, for the answers take memory too."""
    flat = array.reshape(-1)
    return all(np.isfinite(flat[i : i + _BLOCK]).all() for i in range(0, flat.size, _BLOCK))


def random_weights(exported: ExportedModel, seed: int = 0) -> list[np.ndarray]:
    """Weights for timing and tests: normal with deviation 0.02, biases 0, norms 1.

    Parameters
    ----------
    exported : ExportedModel
        Says which parameters, in which order, shape and type.
    seed : int
        Two calls with one seed give the same arrays.
    """
    rng = np.random.default_rng(seed)
    return list(_stored(exported.params, lambda param: _random(param, rng)))


def _stored(
    params: Iterable[ParamSpec], made: Callable[[ParamSpec], np.ndarray]
) -> Iterator[np.ndarray]:
    """Yield the arrays of parameters; of a weight that is quantised, words and scales."""
    for weight, parts in groupby(params, key=lambda param: param.whole or param):
        form, array = next(parts).form, made(weight)
        if form is None:
            yield array
            continue
        try:
            yield from pack(array, form)
        except QuantizationError as err:
            raise WeightsError(f"{weight.name!r} cannot be quantised: {err}") from err


def _random(param: ParamSpec, rng: np.random.Generator) -> np.ndarray:
    if param.recipe.compute is not None:
        return param.recipe.compute()
    if param.name.endswith("bias"):
        return np.zeros(param.shape, param.dtype)
    if len(param.shape) == 1:
        return np.ones(param.shape, param.dtype)
    values = rng.standard_normal(param.shape, dtype=np.float32)
    values *= np.float32(0.02)
    return values.astype(param.dtype, copy=False)


def _load(param: ParamSpec, checkpoint: Checkpoint) -> np.ndarray:
    recipe = param.recipe
    if recipe.compute is not None:
        return recipe.compute()
    if len(recipe.names) == 1:
        stored = param.shape[::-1] if recipe.transpose else param.shape
        value = _convert(checkpoint.tensor(recipe.names[0], stored), param, recipe.names[0])
        return np.ascontiguousarray(value.T) if recipe.transpose else value
    merged = np.empty(param.shape, param.dtype)
    row = 0
    for name, rows in zip(recipe.names, recipe.rows, strict=True):
        part = checkpoint.tensor(name, (rows, *param.shape[1:]))
        merged[row : row + rows] = _convert(part, param, name)
        row += rows
    return merged


def _convert(value: np.ndarray, param: ParamSpec, name: str) -> np.ndarray:
    with np.errstate(over="raise"):
        try:
            return value.astype(param.dtype, copy=False)
        except FloatingPointError as err:
            hint = "" if param.dtype == "float32" else "; export with float32"
            raise WeightsError(
                f"{name!r} has values beyond the range of {param.dtype}{hint}"
            ) from err
