"""Rotary position embeddings: how frequencies are scaled, and the table of angles.

The table is computed once on the host in float64 and handed to the model as one float32 parameter,
because GPU code generators lower ``sin`` and ``cos`` to fast approximations whose error grows with
the angle, and because every layer and both exported functions read the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .errors import ConfigError, UnsupportedFeatureError


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are derived from ``rope_theta``.

    Parameters
    ----------
    kind : str
        ``"default"``, ``"linear"`` or ``"llama3"``.
    factor, low_freq_factor, high_freq_factor : float
        As in the configuration; the last two are read by ``"llama3"`` only.
    original_max_position : int
        The context length of pre-training; read by ``"llama3"`` only.
    """

    KINDS: ClassVar[tuple[str, ...]] = ("default", "linear", "llama3")

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> RopeScaling:
        """Read ``rope_scaling`` (older files) or ``rope_parameters`` (transformers 5)."""
        if not data:
            return cls()
        kind = data.get("rope_type", data.get("type", "default"))
        if kind not in cls.KINDS:
            raise UnsupportedFeatureError(
                f"rope scaling type {kind!r} is not supported; known types: {', '.join(cls.KINDS)}"
            )
        if data.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedFeatureError(
                "partial_rotary_factor other than 1.0 is not supported for LLaMA"
            )
        if kind == "default":
            return cls()
        factor = _number(data, "factor", kind)
        if kind == "linear":
            return cls(kind, factor)
        return cls(
            kind,
            factor,
            _number(data, "low_freq_factor", kind),
            _number(data, "high_freq_factor", kind),
            int(_number(data, "original_max_position_embeddings", kind)),
        )


def inverse_frequencies(theta: float, head_dim: int, scaling: RopeScaling) -> np.ndarray:
    """Angle per position of each rotary pair.

    Parameters
    ----------
    theta : float
        The base of the geometric series.
    head_dim : int
        Width of one head.
    scaling : RopeScaling
        ``"linear"`` divides every frequency by ``factor``; ``"llama3"`` divides the long
        wavelengths, keeps the short ones, and blends those between linearly in frequency
        (LLaMA 3.1 model card and Meta's reference implementation).

    Returns
    -------
    numpy.ndarray
        float64, shape ``[head_dim // 2]``.
    """
    freq = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling.kind == "default":
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    turns = scaling.original_max_position * freq / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return keep * freq + (1.0 - keep) * freq / scaling.factor


def rope_table(freq: np.ndarray, length: int) -> np.ndarray:
    """Cosines and sines of every position.

    Returns
    -------
    numpy.ndarray
        float32, shape ``[length, 2 * len(freq)]``: cosines in the first half of a row, sines in
        the second.
    """
    angle = np.arange(length, dtype=np.float64)[:, None] * freq[None, :]
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def _number(data: Mapping[str, Any], key: str, kind: str) -> float:
    if data.get(key) is None:
        raise ConfigError(f"rope scaling {kind!r} needs the field {key!r}, which is missing")
    return float(data[key])
