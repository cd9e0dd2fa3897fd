"""From a configuration to an IRModule and the list of parameters that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tvm import relax, tirx
from tvm.ir import IRModule
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import spec

from ..canonical.rewriter import UPPER
from ..errors import ConfigError, QuantizationError
from ..quantization import Quantization
from ..quantization import quantization as quantization_of
from ..transforms.whole_graph import BOUND_ATTR, HINTS_ATTR
from ..validation import MAX_INT32, MOST_ELEMENTS, plain, shown
from ..workload import Packed
from . import bert, gpt2, llama
from .config import BertConfig, Config, LlamaConfig
from .layers import DTYPES, FORM, WHOLE, Recipe, quantized
from .shards import Shards, checked_shards

_FAMILIES: dict[str, tuple[ModuleType, type[nn.Module]]] = {
    "llama": (llama, llama.LlamaForCausalLM),
    "gpt2": (gpt2, gpt2.GPT2LMHeadModel),
    "bert": (bert, bert.BertForMaskedLM),
}


LENGTH, TOTAL = "seq_len", "total_len"
"""Names of symbolic dimensions: tokens of a call, and of the sequence after it."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of an exported model.

    Parameters
    ----------
    name : str
        Its name in the module.
    shape : tuple[int, ...]
        Its shape; always static.
    dtype : str
        Its element type.
    recipe : Recipe
        How it, or the weight that it is a part of, is made from a Hugging Face checkpoint.
    whole : ParamSpec, optional
        The weight, where that is stored quantised and this is its words or, behind them, its
        scales.
    form : Packed, optional
        How that weight is stored.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    recipe: Recipe
    whole: ParamSpec | None = None
    form: Packed | None = None


@dataclass(frozen=True)
class ExportedModel:
    """A model as Relax functions, before any weight is read.

    Parameters
    ----------
    mod : IRModule
        Decoders have ``prefill``, called with ``(input_ids, total_len, caches, params)``: int32
        ``[batch, seq_len]``, a shape of one number, a tuple of cache tensors (keys and values of
        layer 0, of layer 1, ...) that is updated in place, and the tuple of parameters. It returns
        ``(logits, caches)`` with float32 logits ``[batch, 1, vocab]`` of the last position.

        They have ``decode`` too, called with ``(input_ids, length, total_len, caches, params)``,
        which runs one token of each sequence.  ``length``, int32 ``[1]``, tells how many tokens
        the caches hold; ``total_len`` is any number above it, of which a few distinct ones do:
        keys behind are not read.  It returns ``(logits, caches, input_ids, length)``, of which
        the last two were updated in place: by the tokens with the largest logits, and by one.  So
        the next call takes the same arguments; where it does, a GPU replays one graph.  The logits
        are then overwritten by it.

        An encoder has ``encode(input_ids, token_type_ids, attention_mask, params)`` that returns
        float32 ``[batch, seq_len, vocab]``.  Where both sizes are static and every call takes the
        same memory, a GPU replays one graph, and a result is overwritten by the next.
    params : tuple[ParamSpec, ...]
        The parameters, in the order of the tuple ``params``.
    config : Config
        What it was exported from.
    dtype : str
        Element type of activations and caches, and of weights that are not quantised.
    functions : tuple[str, ...]
        Names of the functions in ``mod``.
    cache_shapes : tuple[tuple[int | str, ...], ...]
        Shape of each cache tensor ``(batch, max_seq_len, kv_heads, head_dim)``.
    max_seq_len : int
        The most tokens that a sequence can have.
    batch : int or str
        The batch size, or the name of the symbolic dimension.
    quantization : str, optional
        How the weights of projections and embeddings are stored.
    seq_len : int, optional
        How many tokens every call of an encoder takes; any number up to `max_seq_len` by default.
    shards : int
        Over how many workers the model is spread; shapes are those of one of them.
    """

    mod: IRModule
    params: tuple[ParamSpec, ...]
    config: Config
    dtype: str
    functions: tuple[str, ...]
    cache_shapes: tuple[tuple[int | str, ...], ...]
    max_seq_len: int
    batch: int | str
    quantization: str | None = None
    seq_len: int | None = None
    shards: int = 1


def export(
    config: Config,
    *,
    dtype: str | None = None,
    max_seq_len: int | None = None,
    batch: int | str = 1,
    quantization: str | None = None,
    seq_len: int | None = None,
    shards: int = 1,
) -> ExportedModel:
    """Build the Relax module of a configuration; no weight is allocated.

    Parameters
    ----------
    config : Config
        From `load_config`, `config_from_dict` or `zoo`.
    dtype : str, optional
        ``"float32"``, ``"float16"`` or ``"bfloat16"``; by default that of `quantization`, or
        float32.
    max_seq_len : int, optional
        Rows of the caches; by default the configuration's ``max_position``.
    batch : int or str
        A static batch size, or the name of a symbolic dimension such as ``"batch_size"``.
    quantization : str, optional
        How projections and embeddings store their weights: a name of
        `relax_fusion.QUANTIZATIONS`, such as ``"q4f16_1"``.
    seq_len : int, optional
        How many tokens every call of an encoder takes, which makes one CUDA graph of it where
        `batch` is static; any number by default.  Decoders take none.
    shards : int
        Over how many workers a decoder is spread, which run the same module with parameters of
        their own: see `ParallelGenerator`.

    Raises
    ------
    ConfigError
        If an argument does not fit the configuration.
    """
    if max_seq_len is None and isinstance(config, Config):
        max_seq_len = config.max_position
    max_seq_len, batch, seq_len = plain(max_seq_len), plain(batch), plain(seq_len)
    stored = None if quantization is None else _quantization(quantization, dtype, config)
    if dtype is None:
        dtype = stored.dtype if stored else "float32"
    _check_arguments(config, dtype, max_seq_len, batch)
    spread = checked_shards(config, shards)
    family, cls = _FAMILIES[config.family]
    caches = _cache_shapes(config, max_seq_len, batch, spread)
    if seq_len is not None:
        _check_length(seq_len, 0 if caches else max_seq_len)
    length = LENGTH if seq_len is None else seq_len
    specs = _decoder_specs(caches, dtype, batch) if caches else _encoder_specs(batch, length)
    model = cls(config, max_seq_len, dtype, *((spread,) if caches else ()))
    mod, named = (quantized(model, stored) if stored else model).export_tvm(specs)
    bound = {UPPER: {TOTAL: max_seq_len}, HINTS_ATTR: [TOTAL]} if caches else {}
    name = "decode" if caches else "encode"
    mod[name] = mod[name].with_attrs({BOUND_ATTR: True, **bound})
    for function in specs if caches else ():
        mod[function] = _within_caches(mod[function], max_seq_len)
    recipes = family.recipes(config, max_seq_len, *((spread,) if caches else ()))
    params = tuple(_param_spec(name, param, recipes) for name, param in named)
    sizes = (caches, max_seq_len, batch)
    stored_as = (quantization, seq_len, spread.count)
    return ExportedModel(mod, params, config, dtype, tuple(specs), *sizes, *stored_as)


def _within_caches(func: relax.Function, rows: int) -> relax.Function:
    """Return a function of a decoder that fails before it does anything where caches are too short.

    ``total_len <= rows``, and of a prompt ``seq_len <= total_len``, as sizes that are `rows` and 0
    then: TVM's error has what they are, and what they should be.
    """
    (total,) = next(p.ty for p in func.params if isinstance(p.ty, relax.ShapeType)).values
    seq_len = func.params[0].ty.shape.values[1]
    most, zero = (tirx.IntImm("int64", n) for n in (rows, 0))
    size = relax.ShapeExpr([tirx.max(total, most), tirx.max(seq_len - total, zero)])
    sizes = relax.Var("sizes", size.ty)
    within = relax.ShapeType([most, zero])
    first = relax.BindingBlock(
        [relax.VarBinding(sizes, size), relax.MatchCast(relax.Var("within", within), sizes, within)]
    )
    body = relax.SeqExpr([first, *func.body.blocks], func.body.body)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)


def _param_spec(name: str, param: nn.Parameter, recipes: Mapping[str, Recipe]) -> ParamSpec:
    whole, form = None, param.attrs.get(FORM)
    weight = name if form is None else f"{name.rpartition('.')[0]}.weight"
    recipe = recipes.get(weight, Recipe((weight,)))
    if form is not None:
        whole = ParamSpec(weight, param.attrs[WHOLE], "float32", recipe)
        _check_groups(whole, form)
    return ParamSpec(name, tuple(map(int, param.shape)), str(param.dtype), recipe, whole, form)


def _check_groups(weight: ParamSpec, form: Packed) -> None:
    """Refuse a cut within a group, whose parts would get scales of their own."""
    cut, part = weight.recipe.cut, weight.shape[-1]
    if cut is not None and cut.axis == 1 and part % form.group:
        raise ConfigError(
            f"{weight.name!r} cannot be spread over {cut.shards} workers: each would have {part} "
            f"features, which are no multiple of the {form.group} that share a scale"
        )


def _quantization(name: str, dtype: str | None, config: Config) -> Quantization:
    """Return the format of a name, if it goes with the type that was asked for and the model."""
    try:
        found = quantization_of(name)
    except QuantizationError as err:
        raise ConfigError(str(err)) from err
    if dtype not in (None, found.dtype):
        raise ConfigError(f"dtype is {shown(dtype)}; models in {name} are of {found.dtype}")
    if found.only_experts and not getattr(config, "experts", None):
        raise ConfigError(f"quantization is {name!r}, for experts alone; the model has none")
    return found


def _check_arguments(config: Config, dtype: str, max_seq_len: int, batch: int | str) -> None:
    if not isinstance(config, Config):
        raise ConfigError(f"config is {shown(config)}; must be what load_config returns")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"dtype {shown(dtype)} is not supported; known: {', '.join(DTYPES)}")
    # A rotary table can be computed for any length; a learned one ends where its weights do.
    learned = config.family != "llama"
    for what, value, most in (
        ("max_seq_len", max_seq_len, config.max_position if learned else MAX_INT32),
        ("batch", batch, MAX_INT32),
    ):
        if what == "batch" and isinstance(value, str) and value.isidentifier():
            if value in (LENGTH, TOTAL):  # it would be the same dimension
                raise ConfigError(f"batch is {value!r}, which is the name of another dimension")
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise ConfigError(f"{what} is {shown(value)}; must be an integer between 1 and {most}")
    heads = config.num_heads * config.head_dim
    widest = max(config.vocab_size, config.hidden_size, 2 * config.intermediate_size, 3 * heads)
    elements = (batch if isinstance(batch, int) else 1) * max_seq_len * widest
    if elements > MOST_ELEMENTS:  # each size fits 32 bits, all together would not fit 64
        raise ConfigError(
            f"batch {batch}, max_seq_len {max_seq_len} and the model's widest layer, {widest}, "
            f"give a tensor of {elements} elements; at most {MOST_ELEMENTS} are possible"
        )


def _check_length(seq_len: int, most: int) -> None:
    """Refuse a static length that an encoder cannot have; `most` is 0 for a decoder."""
    if most == 0:
        raise ConfigError(f"seq_len is {shown(seq_len)}; a decoder takes prompts of any length")
    if type(seq_len) is not int or not 1 <= seq_len <= most:
        raise ConfigError(f"seq_len is {shown(seq_len)}; must be an integer between 1 and {most}")


def _cache_shapes(
    config: Config, max_seq_len: int, batch: int | str, shards: Shards
) -> tuple[tuple[int | str, ...], ...]:
    if isinstance(config, BertConfig):
        return ()
    shape = (batch, max_seq_len, shards.heads(config).kv)
    latent = config.latent if isinstance(config, LlamaConfig) else None
    widths = (config.head_dim, config.head_dim if latent is None else latent.value)
    return tuple((*shape, width) for width in widths) * config.num_layers


def _decoder_specs(caches: tuple[Any, ...], dtype: str, batch: int | str) -> dict[str, Any]:
    tokens = {n: {"input_ids": spec.Tensor([batch, n], "int32")} for n in (LENGTH, 1)}
    others = {
        TOTAL: spec.Int(),
        "caches": [spec.Tensor(shape, dtype) for shape in caches],
        "$": {"param_mode": "packed", "effect_mode": "none"},
    }
    length = {"length": spec.Tensor([1], "int32")}
    return {"prefill": tokens[LENGTH] | others, "decode": tokens[1] | length | others}


def _encoder_specs(batch: int | str, length: int | str) -> dict[str, Any]:
    names = ("input_ids", "token_type_ids", "attention_mask")
    inputs = {name: spec.Tensor([batch, length], "int32") for name in names}
    return {"encode": inputs | {"$": {"param_mode": "packed", "effect_mode": "none"}}}
