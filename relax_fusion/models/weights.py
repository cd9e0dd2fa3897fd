"""From a checkpoint, or from a random seed, to the arrays that an exported model takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import QuantizationError, TensorShapeError, WeightsError, warn
from ..quantization import pack
from ..validation import plain, shown
from ..workload.formats import EXPONENT
from .checkpoint import Checkpoint
from .cuts import Cut
from .export import ExportedModel, ParamSpec
from .mxfp4 import stacked

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


def load_weights(path: str | Path, exported: ExportedModel, rank: int = 0) -> list[np.ndarray]:
    """Read the parameters of a model from a Hugging Face directory.

    Parameters
    ----------
    path : str or Path
        A directory with ``model.safetensors``, or an index and its shards; or one such file.
    exported : ExportedModel
        Says which parameters, in which order, shape and type.
    rank : int
        Of which worker, where the model is spread over several: it reads its own parts.

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
    check_rank(rank, exported)
    arrays = list(_stored(exported.params, lambda param: _load(param, checkpoint, rank)))
    patterns = list(_HARMLESS[family])
    if getattr(exported.config, "tie_word_embeddings", False):
        patterns.append(r"^lm_head\.weight$")
    if not getattr(exported.config, "masked_lm", True):
        patterns.append(r"^cls\.")
    unused = [n for n in checkpoint.unread() if not any(re.search(p, n) for p in patterns)]
    if unused and rank == 0:  # which reads a part of every tensor
        text = f"{path} holds {len(unused)} tensor(s) that the model does not use: {_some(unused)}"
        warn(text, UnusedTensorsWarning)
    pairs = zip(exported.params, arrays, strict=True)
    wrong = [param.name for param, array in pairs if not _is_finite(array, param)]
    if wrong:
        text = f"{path} holds NaN or infinities in {len(wrong)} weight(s): {_some(wrong)}"
        warn(text, NotFiniteWarning)
    return arrays


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _is_finite(array: np.ndarray, param: ParamSpec) -> bool:
    """Tell whether no element is NaN or infinite; in blocks, for the answers take memory too."""
    if param.form is not None and param.form.scale_dtype == EXPONENT:
        return not param.name.endswith("scale") or bool(array.max() < 255)
    flat = array.reshape(-1)
    return all(np.isfinite(flat[i : i + _BLOCK]).all() for i in range(0, flat.size, _BLOCK))


def check_rank(rank: Any, exported: ExportedModel) -> None:
    """Refuse what is no number of a worker."""
    if type(plain(rank)) is not int or not 0 <= rank < exported.shards:
        raise WeightsError(f"rank is {shown(rank)}; must be from 0 to {exported.shards - 1}")


def random_weights(exported: ExportedModel, seed: int = 0, rank: int = 0) -> list[np.ndarray]:
    """Weights for timing and tests: normal with deviation 0.02, biases 0, norms 1.

    Parameters
    ----------
    exported : ExportedModel
        Says which parameters, in which order, shape and type.
    seed : int
        Two calls with one seed give the same arrays.
    rank : int
        Of which worker, where the model is spread: the parts are those of the whole model's.
    """
    check_rank(rank, exported)
    rng = np.random.default_rng(seed)

    def made(param: ParamSpec) -> np.ndarray:
        cut = param.recipe.cut
        if param.recipe.compute is not None:
            return _computed(param, rank)
        whole = param if cut is None else replace(param, shape=cut.whole(param.shape))
        value = _random(whole, rng)
        return value if cut is None else cut.part(value, rank)

    return list(_stored(exported.params, made))


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
    if param.name.endswith("bias"):
        return np.zeros(param.shape, param.dtype)
    if len(param.shape) == 1:
        return np.ones(param.shape, param.dtype)
    values = rng.standard_normal(param.shape, dtype=np.float32)
    values *= np.float32(0.02)
    return values.astype(param.dtype, copy=False)


def _computed(param: ParamSpec, rank: int) -> np.ndarray:
    assert param.recipe.compute is not None
    value, cut = param.recipe.compute(), param.recipe.cut
    return value if cut is None else cut.part(value, rank)


def _load(param: ParamSpec, checkpoint: Checkpoint, rank: int) -> np.ndarray:
    recipe, cut = param.recipe, param.recipe.cut
    if recipe.compute is not None:
        return _computed(param, rank)
    if cut is not None and not cut.segments and rank > 0:
        return np.zeros(param.shape, param.dtype)
    if cut is not None and cut.segments:
        return _load_parts(param, cut, checkpoint, rank)
    if recipe.arrange is not None and recipe.stored is not None:
        value = stacked(checkpoint, recipe.names[0], recipe.stored)
        return recipe.arrange(_convert(value, param, recipe.names[0]))
    if len(recipe.names) == 1:
        stored = param.shape[::-1] if recipe.transpose else param.shape
        value = _convert(checkpoint.tensor(recipe.names[0], stored), param, recipe.names[0])
        return np.ascontiguousarray(value.T) if recipe.transpose else value
    merged = np.empty(param.shape, param.dtype)
    row = 0
    spans = recipe.spans or (None,) * len(recipe.names)
    for name, rows, span in zip(recipe.names, recipe.rows, spans, strict=True):
        shape = (rows, *param.shape[1:])
        part = checkpoint.tensor(name, None if span else shape, span)
        if part.shape != shape:
            raise TensorShapeError(f"{name!r} has no part of shape {list(shape)} at {span}")
        merged[row : row + rows] = _convert(part, param, name)
        row += rows
    return merged


def _load_parts(param: ParamSpec, cut: Cut, checkpoint: Checkpoint, rank: int) -> np.ndarray:
    """Read a worker's part of each segment of a weight, which are one tensor or several."""
    recipe, shape = param.recipe, cut.whole(param.shape)
    found = np.zeros(param.shape, param.dtype)
    several = len(recipe.names) > 1
    place = before = 0
    for i, segment in enumerate(cut.segments):
        name = recipe.names[i] if several else recipe.names[0]
        stored = (segment.size, *shape[1:]) if several else shape
        first, last = (before + end for end in segment.span(rank, cut.shards))
        axis = 1 - cut.axis if recipe.transpose else cut.axis
        span = (axis, first, last)
        value = checkpoint.tensor(name, stored[::-1] if recipe.transpose else stored, span)
        part = _convert(value, param, name)
        at = [slice(None)] * cut.axis + [slice(place, place + last - first)]
        found[tuple(at)] = part.T if recipe.transpose else part
        place += segment.part
        before += 0 if several else segment.size
    return found


def _convert(value: np.ndarray, param: ParamSpec, name: str) -> np.ndarray:
    with np.errstate(over="raise"):
        try:
            return value.astype(param.dtype, copy=False)
        except FloatingPointError as err:
            hint = "" if param.dtype == "float32" else "; export with float32"
            raise WeightsError(
                f"{name!r} has values beyond the range of {param.dtype}{hint}"
            ) from err
