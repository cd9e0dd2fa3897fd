"""Steps of an exported decoder: one call of it, and weights by which many tokens are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm

from relax_fusion.models import ExportedModel, random_weights


def logits_of_step(
    decode: Any,
    ids: np.ndarray,
    total: int,
    caches: Sequence[Any],
    params: Sequence[Any],
    device: tvm.runtime.Device | None = None,
) -> np.ndarray:
    """Append tokens ``[batch, 1]``, so that there are `total`; float32 ``[batch, 1, vocab]``."""
    device = tvm.cpu() if device is None else device
    tokens = tvm.runtime.tensor(ids, device)
    length = tvm.runtime.tensor(np.array([total - 1], "int32"), device)
    logits, _, *after = decode(tokens, length, tvm.runtime.ShapeTuple([total]), caches, params)
    chosen, count = (t.numpy() for t in after)
    found = logits.numpy()
    np.testing.assert_array_equal(chosen, found.argmax(-1))
    assert count == total
    return found


def various_weights(exported: ExportedModel) -> list[np.ndarray]:
    """Return random weights by which a decoder chooses many tokens: `random_weights` give four."""
    pairs = zip(exported.params, random_weights(exported), strict=True)
    return [
        w * w.dtype.type(8) if w.ndim == 2 and w.dtype.kind == "f" and "rope" not in p.name else w
        for p, w in pairs
    ]
