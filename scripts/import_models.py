"""Bring small models of transformers through TVM's importers, as data for tests.

    python scripts/import_models.py [FAMILY ...]

Writes tests/data/models/FAMILY.tar.xz: each model of two layers with random weights, exported with
eager attention and PyTorch's own, static and dynamic shapes, float32 and float16, by torch.export
and as ONNX.  What cannot be exported or imported is said and left out.  Needs torch, transformers,
onnx and onnxscript, and minutes for each family.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import tvm_ffi
from tvm import ir, relax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from relax_fusion.frontends.torch import from_exported_program
from tests.support.imported import pack, parse, without_constants

WIDTH, INNER, WORDS, LAYERS, HEADS = 256, 512, 512, 2, 4
BATCH, LENGTH, FRAMES, IMAGE = 2, 24, 48, 32
VARIANTS = (
    *(("sdpa", shape, "f32", "torch") for shape in ("static", "dyn")),
    *(("eager", shape, "f32", "torch") for shape in ("static", "dyn")),
    *((kind, shape, "f16", "torch") for kind in ("sdpa", "eager") for shape in ("static", "dyn")),
    *(("sdpa", shape, "f32", "onnx") for shape in ("static", "dyn")),
)
"""Attention, shapes, dtype and the way of each module."""

Made = tuple[torch.nn.Module, tuple[torch.Tensor, ...], tuple[dict[int, Any], ...]]
"""A model, its inputs, and which of their dimensions are dynamic in a dynamic export."""


class _Called(torch.nn.Module):
    """A model that is called with tensors and returns one."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...], result: str, **fixed: Any):
        super().__init__()
        self.model, self.names, self.result, self.fixed = model, names, result, fixed

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        given = dict(zip(self.names, inputs, strict=True))
        return getattr(self.model(**given, **self.fixed), self.result)


def _ids() -> torch.Tensor:
    return torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) * 7 % WORDS


def _dims() -> tuple[Any, Any]:
    return torch.export.Dim("b", min=1, max=64), torch.export.Dim("s", min=2, max=64)


def _decoder(name: str, **options: Any) -> Callable[[str], Made]:
    """Return a maker of a causal language model without a cache."""

    def make(attention: str) -> Made:
        config = getattr(transformers, f"{name}Config")(
            **{**_DECODER, **options}, attn_implementation=attention
        )
        suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        model = getattr(transformers, name.removesuffix("Text") + suffix)(config)
        return _reading_ids(model, "logits", use_cache=False)

    return make


def _reading_ids(model: torch.nn.Module, result: str, **options: Any) -> Made:
    """Return a model of tokens only, whose batch and length are dynamic."""
    b, s = _dims()
    return _Called(model, ("input_ids",), result, **options), (_ids(),), ({0: b, 1: s},)


_DECODER = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def _t5_encoder(attention: str) -> Made:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        feed_forward_proj="relu",
        attn_implementation=attention,
    )
    return _reading_ids(transformers.T5EncoderModel(config), "last_hidden_state")


def _distilbert(attention: str) -> Made:
    config = transformers.DistilBertConfig(
        vocab_size=WORDS,
        dim=WIDTH,
        hidden_dim=INNER,
        n_layers=LAYERS,
        n_heads=HEADS,
        max_position_embeddings=128,
        attn_implementation=attention,
    )
    return _reading_ids(transformers.DistilBertModel(config), "last_hidden_state")


def _vit(attention: str) -> Made:
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=IMAGE,
        patch_size=8,
        attn_implementation=attention,
    )
    model = transformers.ViTModel(config, add_pooling_layer=False)
    called = _Called(model, ("pixel_values",), "last_hidden_state")
    return called, (torch.randn(BATCH, 3, IMAGE, IMAGE),), ({0: _dims()[0]},)


def _whisper(attention: str) -> torch.nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=16,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        max_source_positions=FRAMES // 2,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
        attn_implementation=attention,
    )
    return transformers.WhisperModel(config)


def _whisper_encoder(attention: str) -> Made:
    called = _Called(_whisper(attention).encoder, ("input_features",), "last_hidden_state")
    return called, (torch.randn(BATCH, 16, FRAMES),), ({0: _dims()[0]},)


def _whisper_decoder(attention: str) -> Made:
    b, s = _dims()
    names = ("input_ids", "encoder_hidden_states")
    called = _Called(_whisper(attention).decoder, names, "last_hidden_state", use_cache=False)
    inputs = (_ids(), torch.randn(BATCH, FRAMES // 2, WIDTH))
    return called, inputs, ({0: b, 1: s}, {0: b})


FAMILIES: dict[str, Callable[[str], Made]] = {
    "distilbert": _distilbert,
    "gemma2": _decoder("Gemma2", head_dim=256, sliding_window=8),
    "gpt2": _decoder("GPT2", n_positions=128, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS),
    "gptneox": _decoder("GPTNeoX"),
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=8),
    "opt": _decoder("OPT", ffn_dim=INNER, word_embed_proj_dim=WIDTH),
    "phi3": _decoder("Phi3"),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=64),
    "t5enc": _t5_encoder,
    "vit": _vit,
    "whisper_dec": _whisper_decoder,
    "whisper_enc": _whisper_encoder,
}


def imported(family: str, variant: tuple[str, str, str, str]) -> ir.IRModule:
    """Export one model and import it."""
    attention, shape, dtype, way = variant
    torch.manual_seed(0)
    model, inputs, dims = FAMILIES[family](attention)
    kind = torch.float16 if dtype == "f16" else torch.float32
    model = model.eval().to(kind)
    inputs = tuple(x.to(kind) if x.is_floating_point() else x for x in inputs)
    # torch names the star argument of `forward`, whose tensors are one tuple.
    dynamic = {"dynamic_shapes": (dims,)} if shape == "dyn" else {}
    with torch.no_grad():
        if way == "onnx":
            mod = _by_onnx(model, inputs, dynamic)
        else:
            program = torch.export.export(model, inputs, strict=False, **dynamic)
            mod = from_exported_program(program, keep_params_as_input=True)
    return relax.frontend.detach_params(mod)[0]


def _by_onnx(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], dynamic: Any) -> ir.IRModule:
    import onnx
    from tvm.relax.frontend.onnx import from_onnx

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            model, inputs, path, dynamo=True, external_data=False, opset_version=18, **dynamic
        )
        return from_onnx(onnx.load(path), keep_params_in_input=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    args = parser.parse_args()
    unknown = [name for name in args.families if name not in FAMILIES]
    if unknown:
        parser.error(f"{unknown[0]!r} is no family; there are {', '.join(FAMILIES)}")
    warnings.filterwarnings("ignore")
    for family in args.families or FAMILIES:
        modules = {}
        for variant in VARIANTS:
            tag = "-".join((family, *variant))
            try:
                mod = imported(family, variant)
            except Exception as err:  # of exporters and importers, with no common class
                print(f"{tag}: left out, {type(err).__name__}: {str(err).splitlines()[-1][:200]}")
                continue
            if not tvm_ffi.structural_equal(parse(*without_constants(mod)), mod, True):
                print(f"{tag}: weights are parameters")
            modules[tag] = mod
        pack(family, modules)


if __name__ == "__main__":
    main()
