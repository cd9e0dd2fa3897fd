"""The errors that loading, describing or running a model can raise."""

from __future__ import annotations

from ..errors import RelaxFusionError


class ModelError(RelaxFusionError, ValueError):
    """Something about a model, its files or its inputs is wrong; the message says what to do."""


class ConfigError(ModelError):
    """A ``config.json`` is missing, unreadable, or lacks a field that the architecture needs."""


class UnknownArchitectureError(ConfigError):
    """The configuration names an architecture that this library does not build."""


class UnsupportedFeatureError(ConfigError):
    """The architecture is known, but a setting of this configuration is not implemented."""


class WeightsError(ModelError):
    """A checkpoint does not hold what the model needs."""


class MissingTensorError(WeightsError):
    """A tensor that the model needs is in none of the checkpoint's files."""


class TensorShapeError(WeightsError):
    """A tensor of the checkpoint has another shape than the configuration implies."""


class CheckpointFileError(WeightsError):
    """A checkpoint file is missing, truncated or not a safetensors file."""


class InputError(ModelError):
    """The tokens given to a running model do not fit it."""


class ContextOverflowError(InputError):
    """More tokens were given than the key/value cache has room for."""
