"""One call of an exported model's ``decode``, whose arguments are new tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm


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
