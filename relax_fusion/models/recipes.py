"""How one parameter of a model is made from the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Recipe:
    """Source of one parameter.

    Parameters
    ----------
    names : tuple[str, ...]
        Checkpoint tensors, concatenated along axis 0.
    rows : tuple[int, ...]
        Rows of each, where there are several.
    transpose : bool
        Whether each tensor is stored ``[in, out]`` (GPT-2's Conv1D) and must be turned.
    compute : Callable[[], numpy.ndarray], optional
        Makes a parameter that no checkpoint holds; ``names`` is then empty.
    """

    names: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    transpose: bool = False
    compute: Callable[[], np.ndarray] | None = None
