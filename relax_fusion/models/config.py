"""Model configurations: frozen records made from a Hugging Face ``config.json``.

Field names follow one spelling across the three families, so that the rest of the package never
asks which family it has before reading ``num_layers``; ``from_dict`` knows the spellings of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from .errors import ConfigError, UnknownArchitectureError, UnsupportedFeatureError
from .rope import RopeScaling

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
"""The values of ``hidden_act`` / ``activation_function`` that the models build."""


@dataclass(frozen=True)
class LlamaConfig:
    """A LLaMA 2 or 3 decoder: RMSNorm, rotary positions, grouped-query attention, gated FFN."""

    family: ClassVar[str] = "llama"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_divides("num_attention_heads", self.num_heads, "key/value heads", self.num_kv_heads)
        _check_divides("head_dim", self.head_dim, "2 (rotary pairs)", 2)
        _check_activation(self.hidden_act)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LlamaConfig:
        """Make the record from the keys of a Hugging Face LLaMA ``config.json``."""
        hidden, heads = (
            int(_require(data, key, "a LLaMA config"))
            for key in ("hidden_size", "num_attention_heads")
        )
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        return cls(
            vocab_size=int(_require(data, "vocab_size", "a LLaMA config")),
            hidden_size=hidden,
            intermediate_size=int(_require(data, "intermediate_size", "a LLaMA config")),
            num_layers=int(_require(data, "num_hidden_layers", "a LLaMA config")),
            num_heads=heads,
            num_kv_heads=int(data.get("num_key_value_heads") or heads),
            head_dim=int(data.get("head_dim") or hidden // heads),
            max_position=int(data.get("max_position_embeddings", 2048)),
            norm_eps=float(data.get("rms_norm_eps", 1e-6)),
            rope_theta=float(data.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            rope_scaling=RopeScaling.from_dict(rope),
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            attention_bias=bool(data.get("attention_bias", False)),
            mlp_bias=bool(data.get("mlp_bias", False)),
            hidden_act=str(data.get("hidden_act", "silu")),
        )


@dataclass(frozen=True)
class GPT2Config:
    """A GPT-2 decoder: LayerNorm before each block, learned positions, tied output head."""

    family: ClassVar[str] = "gpt2"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position: int
    norm_eps: float = 1e-5
    hidden_act: str = "gelu_new"
    tie_word_embeddings: bool = True
    scale_attention: bool = True
    scale_by_layer: bool = False

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_divides("n_embd", self.hidden_size, "n_head", self.num_heads)
        _check_activation(self.hidden_act)

    @property
    def num_kv_heads(self) -> int:
        """GPT-2 has one key/value head for each query head."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GPT2Config:
        """Make the record from the keys of a Hugging Face GPT-2 ``config.json``."""
        _refuse(data, "add_cross_attention")
        hidden = int(_require(data, "n_embd", "a GPT-2 config"))
        return cls(
            vocab_size=int(_require(data, "vocab_size", "a GPT-2 config")),
            hidden_size=hidden,
            intermediate_size=int(data.get("n_inner") or 4 * hidden),
            num_layers=int(_require(data, "n_layer", "a GPT-2 config")),
            num_heads=int(_require(data, "n_head", "a GPT-2 config")),
            max_position=int(data.get("n_positions") or data.get("n_ctx") or 1024),
            norm_eps=float(data.get("layer_norm_epsilon", 1e-5)),
            hidden_act=str(data.get("activation_function", "gelu_new")),
            tie_word_embeddings=bool(data.get("tie_word_embeddings", True)),
            scale_attention=bool(data.get("scale_attn_weights", True)),
            scale_by_layer=bool(data.get("scale_attn_by_inverse_layer_idx", False)),
        )


@dataclass(frozen=True)
class BertConfig:
    """A BERT encoder, with its masked-LM head or (``masked_lm=False``) bare."""

    family: ClassVar[str] = "bert"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position: int
    type_vocab_size: int = 2
    norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    masked_lm: bool = True

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_divides("hidden_size", self.hidden_size, "num_attention_heads", self.num_heads)
        _check_activation(self.hidden_act)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BertConfig:
        """Make the record from the keys of a Hugging Face BERT ``config.json``."""
        for key in ("is_decoder", "add_cross_attention"):
            _refuse(data, key)
        positions = data.get("position_embedding_type", "absolute")
        if positions != "absolute":
            raise UnsupportedFeatureError(
                f"BERT position_embedding_type {positions!r} is not supported; only 'absolute' is"
            )
        numbers = {
            ours: int(_require(data, theirs, "a BERT config"))
            for ours, theirs in (
                ("vocab_size", "vocab_size"),
                ("hidden_size", "hidden_size"),
                ("intermediate_size", "intermediate_size"),
                ("num_layers", "num_hidden_layers"),
                ("num_heads", "num_attention_heads"),
            )
        }
        return cls(
            **numbers,
            max_position=int(data.get("max_position_embeddings", 512)),
            type_vocab_size=int(data.get("type_vocab_size", 2)),
            norm_eps=float(data.get("layer_norm_eps", 1e-12)),
            hidden_act=str(data.get("hidden_act", "gelu")),
            masked_lm=_architecture(data) != "BertModel",
        )


Config = LlamaConfig | GPT2Config | BertConfig

_BY_ARCHITECTURE: dict[str, type[Config]] = {
    "LlamaForCausalLM": LlamaConfig,
    "GPT2LMHeadModel": GPT2Config,
    "GPT2Model": GPT2Config,
    "BertForMaskedLM": BertConfig,
    "BertForPreTraining": BertConfig,
    "BertModel": BertConfig,
}
_BY_MODEL_TYPE: dict[str, type[Config]] = {
    cls.family: cls for cls in (LlamaConfig, GPT2Config, BertConfig)
}


def config_from_dict(data: Mapping[str, Any]) -> Config:
    """Make the configuration record of the architecture that ``data`` names.

    Parameters
    ----------
    data : Mapping[str, Any]
        The content of a Hugging Face ``config.json``. ``architectures`` decides where it is
        given, otherwise ``model_type``.

    Raises
    ------
    UnknownArchitectureError
        If neither key names a family that this library builds.
    ConfigError
        If a field that the family needs is missing or a setting is not supported.
    """
    architecture = _architecture(data)
    known = _BY_MODEL_TYPE if architecture is None else _BY_ARCHITECTURE
    name = str(data.get("model_type") if architecture is None else architecture)
    cls = known.get(name)
    if cls is None:
        raise UnknownArchitectureError(
            f"the model architecture {name!r} is not known; known ones: {', '.join(known)}"
        )
    try:
        return cls.from_dict(data)
    except (TypeError, AttributeError) as err:
        raise ConfigError(f"a field of the {name} config has the wrong type: {err}") from err
    except ValueError as err:
        if isinstance(err, ConfigError):
            raise
        raise ConfigError(f"a field of the {name} config is not a number: {err}") from err


def load_config(path: str | Path) -> Config:
    """Read the ``config.json`` of a Hugging Face model directory.

    Parameters
    ----------
    path : str or Path
        The directory, or the JSON file itself.

    Raises
    ------
    ConfigError
        If the file is missing or is not a JSON object, or see `config_from_dict`.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise ConfigError(f"{file} does not exist; give a Hugging Face model directory") from err
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as err:
        raise ConfigError(f"{file} cannot be read as JSON: {err}") from err
    if not isinstance(data, dict):
        raise ConfigError(f"{file} holds a JSON {type(data).__name__}, not an object")
    return config_from_dict(data)


def _architecture(data: Mapping[str, Any]) -> str | None:
    names = data.get("architectures")
    return names[0] if names else None


def _require(data: Mapping[str, Any], key: str, where: str) -> Any:
    if data.get(key) is None:
        raise ConfigError(f"{where} needs the field {key!r}, which is missing")
    return data[key]


def _refuse(data: Mapping[str, Any], key: str) -> None:
    if data.get(key):
        raise UnsupportedFeatureError(f"a config with {key}=true is not supported")


def _check_activation(name: str) -> None:
    if name not in ACTIVATIONS:
        raise UnsupportedFeatureError(
            f"the activation {name!r} is not supported; known ones: {', '.join(ACTIVATIONS)}"
        )


def _check_positive(config: Config) -> None:
    for name, value in vars(config).items():
        if type(value) is int and value <= 0:
            raise ConfigError(f"{type(config).__name__}.{name} must be positive, got {value}")


def _check_divides(what: str, value: int, by: str, divisor: int) -> None:
    if value % divisor:
        raise ConfigError(f"{what} {value} is not divisible by {by} {divisor}")
