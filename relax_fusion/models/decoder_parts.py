"""Parts of a ``config.json`` that several decoders have: windows and rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, UnsupportedFeatureError
from ..validation import shown
from .rope import RopeScaling

Data = Mapping[str, Any]
Fields = dict[str, Any]


def root(value: Any, power: float) -> Any:
    """Return a power of a positive number; anything else as it is, which the record refuses."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return float(value) ** power if is_number else value


def flag(data: Data, key: str, default: bool) -> bool:
    """Return a field that is true or false; raise `ConfigError` where it is anything else."""
    value = data.get(key)
    if not isinstance(value, bool | None):
        raise ConfigError(f"{key} is {shown(value)}; must be true or false")
    return default if value is None else value


def layers_of(data: Data) -> int:
    """Return how many layers there are; 0 for what the checks of the record refuse."""
    layers = data.get("num_hidden_layers")
    return layers if type(layers) is int and 0 < layers <= 10_000 else 0


def windows(data: Data, every: int = 0) -> Fields:
    """Return how many keys each layer sees; ``every`` how many-th layer has no window."""
    window, layers, kinds = data.get("sliding_window"), layers_of(data), data.get("layer_types")
    if not layers:
        return {}
    if every:
        window = 4096 if window is None else window
        slides = [(n + 1) % every != 0 for n in range(layers)]
    else:
        first = data.get("max_window_layers", 28)
        uses = flag(data, "use_sliding_window", False) and window is not None
        slides = [uses and n >= first for n in range(layers)]
    if kinds is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ConfigError(f"layer_types is {shown(kinds)}; must be a list of {layers} names")
        for kind in kinds:
            if kind not in known:
                raise UnsupportedFeatureError(
                    f"layer_types with {shown(kind)} is not supported; known: {', '.join(known)}"
                )
        slides = [kind == "sliding_attention" and window is not None for kind in kinds]
    return {"windows": tuple(window if s else None for s in slides) if any(slides) else ()}


def rotary(data: Data) -> Fields:
    """Read the rotary positions in the spellings of transformers 4 and 5."""
    rope = mapping(data, "rope_parameters") or mapping(data, "rope_scaling")
    for part in (data, rope):
        if part.get("partial_rotary_factor") not in (None, 1.0):
            raise UnsupportedFeatureError(
                f"partial_rotary_factor is {shown(part['partial_rotary_factor'])}; only 1.0 is "
                "supported"
            )
    found: Fields = {"rope_scaling": RopeScaling.from_dict(rope)}
    if rope.get("rope_theta") is not None:  # as in transformers, before the one beside it
        found["rope_theta"] = rope["rope_theta"]
    return found


def mapping(data: Data, key: str) -> Data:
    """Return a field that is a mapping, an empty one where there is none."""
    value = data.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {shown(value)}; must be a mapping")
    return value or {}
