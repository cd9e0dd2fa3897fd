"""Random weights of an exported model, plain and quantised."""

from __future__ import annotations

from typing import Any

import numpy as np

from relax_fusion.models import ExportedModel
from relax_fusion.quantization import dequantize, pack
from relax_fusion.workload.reference import numpy_dtype

ELEMENTS, ROWS = 1 << 22, 509
"""What is drawn, and repeats: elements of plain weights, rows of quantised ones."""


def random_weights(exported: ExportedModel) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Return the parameters of a model, and by name the weights that they stand for.

    Large weights repeat what is drawn: seconds instead of minutes.
    """
    rng = np.random.default_rng(0)
    block = rng.standard_normal(ELEMENTS, "float32") * np.float32(0.02)
    params: list[np.ndarray] = []
    whole: dict[str, np.ndarray] = {}
    stored: list[np.ndarray] = []  # the scales that belong to the words before
    for param in exported.params:
        if stored:
            params.append(stored.pop())
        elif param.form is not None and param.whole is not None:
            n, k = param.whole.shape
            drawn = rng.standard_normal((min(n, ROWS), k), "float32") * np.float32(0.02)
            packed = pack(drawn, param.form)
            name = exported.quantization or ""
            repeated = np.arange(n) % len(drawn)
            words, scales = (v.take(repeated, -3 - param.form.axis) for v in packed)
            whole[param.whole.name] = dequantize(*packed, name, k)[repeated]
            params.append(words)
            stored.append(scales)
        else:
            params.append(_plain(param, block, rng))
            whole[param.name] = params[-1]
    return params, whole


def _plain(param: Any, block: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if param.recipe.compute is not None:
        return np.asarray(param.recipe.compute())
    if len(param.shape) == 1 and param.name.endswith("weight"):  # of a norm
        return np.ones(param.shape, numpy_dtype(param.dtype))
    # Begins anywhere in the block, so that no two rows or weights are alike
    rolled = np.roll(block, int(rng.integers(len(block)))).astype(numpy_dtype(param.dtype))
    return np.resize(rolled, param.shape)
