"""Model configurations: frozen records made from a Hugging Face ``config.json``.

Field names follow one spelling across the families, so that the rest of the package never
asks which family it has before reading ``num_layers``; ``from_dict`` knows the spellings of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, InstanceOf

from ..errors import ConfigError, UnknownArchitectureError, UnsupportedFeatureError
from ..validation import Count, Natural, check, read, shown
from .config_file import read_config
from .decoders import ARCHITECTURES, MODEL_TYPES, SPELLINGS, decoder_fields, stores_mxfp4
from .deepseek import Latent
from .expert_config import MAX_WIDTH, Experts, Width
from .rope import Base, Positive, RopeScaling

Activation = Literal["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"]
"""The values of ``hidden_act`` / ``activation_function`` that the models build."""

Layers = Annotated[Count, Field(le=10_000)]
"""A number of layers: each is a part of the module, so that a typing error would fill the
memory."""

Epsilon = Annotated[float, Field(ge=0, le=1)]
EndTokens = Annotated[tuple[Natural, ...], Field(alias="eos_token_id")]
"""Tokens that end a text; a ``config.json`` has one, a list of them, or none."""

_Family = TypeVar("_Family", "LlamaConfig", "GPT2Config", "BertConfig")


@dataclass(frozen=True)
class LlamaConfig:
    """A decoder like LLaMA: RMSNorm, rotary positions, grouped-query attention, gated FFN.

    Qwen 2 and 3, Mistral, Mixtral, Phi-3, Gemma 2 and 3 differ from LLaMA in these fields:

    Parameters
    ----------
    attention_bias, output_bias : bool
        Of queries, keys and values; of the projection behind attention (None: the same).
    qk_norm : bool
        Whether queries and keys are normalised before they are rotated.
    query_scale : float, optional
        Factor on scores, instead of one over the root of `head_dim`.
    windows : tuple of int or None
        How many keys a query sees, itself included, for each layer; empty: all of them.
    local_rope_theta : float, optional
        Base of the angles in layers with a window; these have no `rope_scaling` then.
    attention_softcap, logit_softcap : float, optional
        Limits that scores and logits approach by tanh.
    embedding_scale : float, optional
        Factor on embeddings.
    norm_offset : bool
        Whether weights of norms are stored less 1.
    post_norms : bool
        Whether the results of attention and FFN are normalised, too, before they are added.
    merged_checkpoint : bool
        Whether a checkpoint holds the merged projections as we do.
    experts : Experts, optional
        Those that layers have in the place of their feed-forward network.
    sinks : bool
        Whether each head of queries has a score more, of a key without a value.
    latent : Latent, optional
        What keys and values are made of, where that is less than all features.
    """

    family: ClassVar[str] = "llama"

    vocab_size: Count
    hidden_size: Width
    intermediate_size: Width
    num_layers: Annotated[Layers, Field(alias="num_hidden_layers")]
    num_heads: Annotated[Width, Field(alias="num_attention_heads")]
    num_kv_heads: Annotated[Width, Field(alias="num_key_value_heads")]
    head_dim: Width
    max_position: Annotated[Count, Field(alias="max_position_embeddings")]
    norm_eps: Annotated[Epsilon, Field(alias="rms_norm_eps")] = 1e-6
    rope_theta: Base = 10000.0
    rope_scaling: InstanceOf[RopeScaling] = field(default_factory=RopeScaling)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: Activation = "silu"
    end_tokens: EndTokens = ()
    output_bias: bool | None = None
    qk_norm: bool = False
    query_scale: Positive | None = None
    windows: tuple[Count | None, ...] = ()
    local_rope_theta: Base | None = None
    attention_softcap: Positive | None = None
    logit_softcap: Positive | None = None
    embedding_scale: Positive | None = None
    norm_offset: bool = False
    post_norms: bool = False
    merged_checkpoint: bool = False
    experts: InstanceOf[Experts] | None = None
    sinks: bool = False
    latent: InstanceOf[Latent] | None = None

    def __post_init__(self) -> None:
        check(self, ConfigError, "LLaMA config")
        _check_divides("num_attention_heads", self.num_heads, "key/value heads", self.num_kv_heads)
        _check_divides("head_dim", self.head_dim, "2 (rotary pairs)", 2)
        if self.num_heads * self.head_dim > MAX_WIDTH:
            raise ConfigError(
                f"LLaMA config: {self.num_heads} heads of head_dim {self.head_dim} have more than "
                f"{MAX_WIDTH} features"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(
                f"LLaMA config: windows is {shown(self.windows)}; must have one of each of the "
                f"{self.num_layers} layers"
            )

    @property
    def rotated(self) -> int:
        """Features of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rotated

    def window(self, layer: int) -> int | None:
        """Return how many keys a query of a layer sees; None for all."""
        return self.windows[layer] if self.windows else None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LlamaConfig:
        """Make the record from a ``config.json`` of a decoder like LLaMA."""
        hidden, heads = (data.get(key) for key in ("hidden_size", "num_attention_heads"))
        defaults = {"max_position_embeddings": 2048, "num_key_value_heads": heads}
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            defaults["head_dim"] = hidden // heads
        fields = {**defaults, **_given(data), **decoder_fields(data)}
        return _read(cls, fields, "LLaMA config", SPELLINGS)


@dataclass(frozen=True)
class GPT2Config:
    """A GPT-2 decoder: LayerNorm before each block, learned positions, tied output head."""

    family: ClassVar[str] = "gpt2"

    vocab_size: Count
    hidden_size: Annotated[Width, Field(alias="n_embd")]
    intermediate_size: Annotated[Width, Field(alias="n_inner")]
    num_layers: Annotated[Layers, Field(alias="n_layer")]
    num_heads: Annotated[Width, Field(alias="n_head")]
    max_position: Annotated[Count, Field(alias="n_positions")]
    norm_eps: Annotated[Epsilon, Field(alias="layer_norm_epsilon")] = 1e-5
    hidden_act: Annotated[Activation, Field(alias="activation_function")] = "gelu_new"
    tie_word_embeddings: bool = True
    scale_attention: Annotated[bool, Field(alias="scale_attn_weights")] = True
    scale_by_layer: Annotated[bool, Field(alias="scale_attn_by_inverse_layer_idx")] = False
    end_tokens: EndTokens = ()

    def __post_init__(self) -> None:
        check(self, ConfigError, "GPT-2 config")
        _check_divides("n_embd", self.hidden_size, "n_head", self.num_heads)

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
        defaults = {"n_positions": data.get("n_ctx") or 1024}
        hidden = data.get("n_embd")
        if isinstance(hidden, int):
            defaults["n_inner"] = 4 * hidden
        return _read(cls, {**defaults, **_given(data)}, "GPT-2 config")


@dataclass(frozen=True)
class BertConfig:
    """A BERT encoder, with its masked-LM head or (``masked_lm=False``) bare."""

    family: ClassVar[str] = "bert"

    vocab_size: Count
    hidden_size: Width
    intermediate_size: Width
    num_layers: Annotated[Layers, Field(alias="num_hidden_layers")]
    num_heads: Annotated[Width, Field(alias="num_attention_heads")]
    max_position: Annotated[Count, Field(alias="max_position_embeddings")] = 512
    type_vocab_size: Count = 2
    norm_eps: Annotated[Epsilon, Field(alias="layer_norm_eps")] = 1e-12
    hidden_act: Activation = "gelu"
    masked_lm: bool = True

    def __post_init__(self) -> None:
        check(self, ConfigError, "BERT config")
        _check_divides("hidden_size", self.hidden_size, "num_attention_heads", self.num_heads)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BertConfig:
        """Make the record from the keys of a Hugging Face BERT ``config.json``."""
        for key in ("is_decoder", "add_cross_attention"):
            _refuse(data, key)
        masked_lm = _architecture(data) != "BertModel"
        if masked_lm and data.get("tie_word_embeddings") is False:
            raise UnsupportedFeatureError(
                "a BERT config with tie_word_embeddings=false is not supported"
            )
        positions = data.get("position_embedding_type")
        if positions not in (None, "absolute"):
            raise UnsupportedFeatureError(
                f"BERT position_embedding_type {shown(positions)} is not supported; only "
                "'absolute' is"
            )
        return _read(cls, {**data, "masked_lm": masked_lm}, "BERT config")


Config = LlamaConfig | GPT2Config | BertConfig

_BY_ARCHITECTURE: dict[str, type[Config]] = {
    "LlamaForCausalLM": LlamaConfig,
    "GPT2LMHeadModel": GPT2Config,
    "GPT2Model": GPT2Config,
    "BertForMaskedLM": BertConfig,
    "BertForPreTraining": BertConfig,
    "BertModel": BertConfig,
    **dict.fromkeys(ARCHITECTURES, LlamaConfig),
}
_BY_MODEL_TYPE: dict[str, type[Config]] = {
    **{cls.family: cls for cls in (LlamaConfig, GPT2Config, BertConfig)},
    **dict.fromkeys(MODEL_TYPES, LlamaConfig),
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
    if not isinstance(data, Mapping):
        raise ConfigError(f"the config is {shown(data)}; must be a mapping")
    architecture = _architecture(data)
    known = _BY_MODEL_TYPE if architecture is None else _BY_ARCHITECTURE
    name = data.get("model_type") if architecture is None else architecture
    cls = known.get(name) if isinstance(name, str) else None
    if cls is None:
        raise UnknownArchitectureError(
            f"the model architecture {shown(name)} is not known; known ones: {', '.join(known)}"
        )
    _refuse({} if stores_mxfp4(data) else data, "quantization_config")
    return cls.from_dict(data)


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
    return config_from_dict(read_config(path))


def _architecture(data: Mapping[str, Any]) -> str | None:
    names = data.get("architectures")
    if names is None or names == []:
        return None
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ConfigError(f"architectures is {shown(names)}; must be a list of names")
    return names[0]


def _given(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null; the tokens that end a text as a tuple."""
    given = {key: value for key, value in data.items() if value is not None}
    if "eos_token_id" in given:
        end = given["eos_token_id"]
        given["eos_token_id"] = tuple(end) if isinstance(end, list) else (end,)
    return given


def _read(
    cls: type[_Family],
    data: Mapping[str, Any],
    where: str,
    keys: Mapping[str, str] = MappingProxyType({}),
) -> _Family:
    return read(cls, data, ConfigError, where, "ignore", keys)


def _refuse(data: Mapping[str, Any], key: str) -> None:
    if data.get(key):
        raise UnsupportedFeatureError(f"a config with {key} {shown(data[key])} is not supported")


def _check_divides(what: str, value: int, by: str, divisor: int) -> None:
    if value % divisor:
        raise ConfigError(f"{what} {value} is not divisible by {by} {divisor}")
