"""Rotary position embeddings: how frequencies are scaled, the tables of angles, the rotation.

The tables are computed once on the host in float64 and handed to the model as float32 parameters,
because GPU code generators lower ``sin`` and ``cos`` to fast approximations whose error grows with
the angle, and because every layer and both exported functions read the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from tvm.relax.frontend.nn import Tensor, op

from ..errors import ConfigError, UnsupportedFeatureError
from ..validation import Count, check, read, shown
from .layers import in_float32
from .places import Place

Positive = Annotated[float, Field(gt=0)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6)]
Base = Annotated[float, Field(gt=1)]
"""Of a series of frequencies that fall; of 1 there is no logarithm to divide by."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are derived from ``rope_theta``.

    Parameters
    ----------
    kind : str
        ``"default"``, ``"linear"``, ``"llama3"`` or ``"yarn"``.
    factor, low_freq_factor, high_freq_factor : float
        As in the configuration; the last two are read by ``"llama3"`` only.
    original_max_position : int
        The context length of pre-training; read by ``"llama3"`` and ``"yarn"``.
    beta_fast, beta_slow : float
        Turns in that length: a pair with more keeps its frequency, one with fewer has it divided.
    truncate : bool
        Whether the pairs with so many turns are rounded to whole ones, outwards.
    attention_factor, mscale, mscale_all_dim : float, optional
        What cosines and sines are multiplied by, or what that is computed of.
    """

    NEEDS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            *("factor", "low_freq_factor", "high_freq_factor"),
            "original_max_position_embeddings",
        ),
        "yarn": ("factor", "original_max_position_embeddings"),
    }
    """The keys of a configuration that each kind needs."""

    MAY_HAVE: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "yarn": (
            *("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale"),
            "mscale_all_dim",
        )
    }
    """Those that it reads where they are given."""

    BESIDE: ClassVar[tuple[str, ...]] = (
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"),
        "original_max_position_embeddings",
    )
    """Those that are read elsewhere, or change no kind that does not need them."""

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: Factor = 1.0
    low_freq_factor: Factor = 1.0
    high_freq_factor: Factor = 4.0
    original_max_position: Annotated[Count, Field(alias="original_max_position_embeddings")] = 8192
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    truncate: bool = True
    attention_factor: Factor | None = None
    mscale: Factor | None = None
    mscale_all_dim: Factor | None = None

    def __post_init__(self) -> None:
        check(self, ConfigError, "rope scaling")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope scaling: high_freq_factor is {self.high_freq_factor}; must be greater than "
                f"low_freq_factor {self.low_freq_factor}"
            )
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(
                f"rope scaling: beta_fast is {self.beta_fast}; must be greater than beta_slow "
                f"{self.beta_slow}"
            )

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by, so that scores grow with the context."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        growth = 0.1 * math.log(max(self.factor, 1.0))
        if self.mscale is not None and self.mscale_all_dim is not None:
            return (1 + growth * self.mscale) / (1 + growth * self.mscale_all_dim)
        return 1 + growth

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> RopeScaling:
        """Read ``rope_scaling`` (older files) or ``rope_parameters`` (transformers 5)."""
        if not data:
            return cls()
        kind = data.get("rope_type", data.get("type", "default"))
        if not isinstance(kind, str) or kind not in cls.NEEDS:
            raise UnsupportedFeatureError(
                f"rope scaling type {shown(kind)} is not supported; known types: "
                f"{', '.join(cls.NEEDS)}"
            )
        known = (*cls.NEEDS[kind], *cls.MAY_HAVE.get(kind, ()))
        for key, value in data.items():
            if key not in (*known, *cls.BESIDE) and value not in (None, False, [], {}):
                raise UnsupportedFeatureError(
                    f"rope scaling {kind!r} with {key} {shown(value)} is not supported"
                )
        fields = {key: data[key] for key in known if data.get(key) is not None}
        missing = [key for key in cls.NEEDS[kind] if key not in fields]
        if missing:
            detail = f"needs the field {missing[0]!r}, which is missing"
            raise ConfigError(f"rope scaling {kind!r} {detail}")
        return read(cls, {"kind": kind, **fields}, ConfigError, "rope scaling")


def inverse_frequencies(theta: float, head_dim: int, scaling: RopeScaling) -> np.ndarray:
    """Angle per position of each rotary pair: float64, ``[head_dim // 2]``.

    `theta`: the base of the geometric series.
    `head_dim`: width of one head.
    `scaling`: ``"linear"`` divides every frequency by ``factor``; ``"llama3"`` divides the long
    wavelengths, keeps the short ones, and blends those between linearly in frequency (LLaMA 3.1
    model card and Meta's reference implementation); ``"yarn"`` blends linearly in the number of the
    pair (Peng et al., 2023, https://arxiv.org/abs/2309.00071).
    """
    freq = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling.kind == "default":
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind == "yarn":
        keep = _kept_by_yarn(theta, head_dim, scaling)
        return keep * freq + (1.0 - keep) * freq / scaling.factor
    turns = scaling.original_max_position * freq / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return keep * freq + (1.0 - keep) * freq / scaling.factor


def _kept_by_yarn(theta: float, head_dim: int, scaling: RopeScaling) -> np.ndarray:
    """Return which part of each pair's frequency is kept."""

    def pair_of(turns: float) -> float:
        rest = scaling.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(rest) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    return 1.0 - np.clip((np.arange(head_dim // 2) - first) / width, 0.0, 1.0)


def rope_table(
    freq: np.ndarray, length: int, function: Callable[..., Any] = np.cos, magnitude: float = 1.0
) -> np.ndarray:
    """Cosines (or sines) of every position, times `magnitude`, in float32.

    The shape is ``[length, 2 * len(freq)]``: both lanes of a pair have the same angle, and lie
    ``len(freq)`` apart.
    """
    angle = np.arange(length, dtype=np.float64)[:, None] * freq[None, :]
    return np.tile(magnitude * function(angle), 2).astype(np.float32)


@dataclass(frozen=True)
class Angles:
    """Cosines and sines of the positions of one call, ``[seq_len, 1, head_dim]``."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def of(cos: Tensor, sin: Tensor, place: Place, dtype: str) -> Angles:
        """Take the rows of the tables of `rope_table` that are for the tokens at a place.

        Where heads are normalised, `dtype` is theirs, as transformers rounds; else float32.
        """
        return Angles(*place.angles(cos, sin, dtype))

    def turn(self, x: Tensor) -> Tensor:
        """Rotate heads ``[batch, seq_len, heads, head_dim]`` in the angles' type, rounded once.

        Lane ``d`` pairs with lane ``d + head_dim / 2``, the order of Hugging Face checkpoints.
        """
        wide = x if x.dtype == self.cos.dtype else in_float32(x)
        low, high = op.split(wide, 2, axis=-1)
        rotated = wide * self.cos + op.concat([op.negative(high), low], dim=-1) * self.sin
        return rotated if x.dtype == wide.dtype else op.astype(rotated, x.dtype)

    def turn_first(self, qkv: Tensor, heads: int) -> Tensor:
        """Rotate the queries and keys of a merged projection ``[batch, seq_len, features]``."""
        batch, seq_len, _ = qkv.shape
        head_dim = self.cos.shape[-1]
        rotated, kept = op.split(qkv, [heads * head_dim], axis=-1)
        rotated = self.turn(op.reshape(rotated, (batch, seq_len, heads, head_dim)))
        return op.concat([op.reshape(rotated, (batch, seq_len, heads * head_dim)), kept], dim=-1)
