"""From a checkpoint, or from a random seed, to the arrays that an exported model takes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from ..errors import QuantizationError
from ..quantization import pack
from .checkpoint import Checkpoint
from .errors import WeightsError
from .export import ExportedModel, ParamSpec

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
        warnings.warn(
            f"{path} holds {len(unused)} tensor(s) that the model does not use: {_some(unused)}",
            UnusedTensorsWarning,
            stacklevel=2,
        )
    pairs = zip(exported.params, arrays, strict=True)
    wrong = [param.name for param, array in pairs if not _is_finite(array)]
    if wrong:
        warnings.warn(
            f"{path} holds NaN or infinities in {len(wrong)} weight(s): {_some(wrong)}",
            NotFiniteWarning,
            stacklevel=2,
        )
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
