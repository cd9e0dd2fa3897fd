"""Whole models of transformers on an NVIDIA GPU: ours, PyTorch, torch.compile, in one run.

    python -m benchmarks run encoders [--cases bert-small] [--sequences 1 8] [--tokens 512]

BERT with embeddings and pooler, GPT-2 with the logits of all tokens, ViT from pixels to classes,
Whisper's encoder behind its convolutions. Random weights, float16, no padding. In PyTorch attention
is `scaled_dot_product_attention` by one of its fused kernels. Ours come through `torch.export` with
the weights as parameters. Everything is captured into CUDA graphs, and L2 is flushed before each
replay.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import geometric_mean
from typing import Any

import torch
import transformers as hf
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.whisper.modeling_whisper import WhisperEncoder
from tvm import ir

from benchmarks import building
from benchmarks.exporting import as_relax
from benchmarks.report import Entry, Verdict, ratio
from benchmarks.suite import Suite
from relax_fusion.studio.bench.torch_peers import TUNED, under_compile

SIZES = {  # layers, hidden, heads, between the matmuls of an MLP
    "bert-mini": (4, 256, 4, 1024),
    "bert-small": (4, 512, 8, 2048),
    "bert-base": (12, 768, 12, 3072),
    "bert-large": (24, 1024, 16, 4096),
    "gpt2": (12, 768, 12, 3072),
    "vit-large": (24, 1024, 16, 4096),
    "whisper-large": (32, 1280, 20, 5120),
}
"""Published sizes (Turc et al., 2019; Devlin et al., 2019; and of the models so called)."""

FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""What PyTorch may compute attention by; the rest of it is several kernels."""

WORST, MEAN = 1.0, 1.25
"""How many times as fast as the faster of PyTorch and torch.compile each is to be, and all by the
geometric mean."""

FIELDS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True)
class Family:
    """An architecture of transformers.

    `model` makes it of a configuration, whose fields of sizes are `fields`; `outputs` gives what it
    computes of an input, without a mask: some models make one when they are traced or captured, for
    which PyTorch has no fused kernel.  `tokens` is told where a model has always as many.
    """

    model: Callable[[Any], Any]
    config: Callable[..., Any]
    outputs: Callable[[Any, torch.Tensor], Any]
    inputs: tuple[int, ...] = ()
    tokens: int | None = None
    fields: tuple[str, ...] = FIELDS


def _bert(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = model.encoder(model.embeddings(input_ids=ids)).last_hidden_state
    return hidden, model.pooler(hidden)


def _vit(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    x = model.vit.embeddings(pixels)
    for layer in model.vit.layers:
        x = layer(x)
    return model.classifier(model.vit.layernorm(x)[:, 0])


def _gpt2(model: Any, ids: torch.Tensor) -> torch.Tensor:
    body = model.transformer
    x = body.wte(ids) + body.wpe.weight[: ids.shape[1]]
    for block in body.h:
        x = block(x)
        x = x[0] if isinstance(x, tuple) else x
    return model.lm_head(body.ln_f(x))


FAMILIES = {
    "bert": Family(hf.BertModel, hf.BertConfig, _bert),
    "gpt2": Family(
        *(hf.GPT2LMHeadModel, hf.GPT2Config, _gpt2),
        fields=("n_layer", "n_embd", "n_head", "n_inner"),
    ),
    "vit": Family(
        hf.ViTForImageClassification,
        lambda **sizes: hf.ViTConfig(num_labels=1000, **sizes),
        _vit,
        *((3, 224, 224), 197),
    ),
    "whisper": Family(
        WhisperEncoder,
        lambda **sizes: hf.WhisperConfig(num_mel_bins=128, **sizes),
        lambda model, features: model(features).last_hidden_state,
        *((128, 3000), 1500),
        ("encoder_layers", "d_model", "encoder_attention_heads", "encoder_ffn_dim"),
    ),
}
"""By what the names of sizes begin with."""


def family(case: str) -> Family:
    return FAMILIES[case.partition("-")[0]]


class Model(torch.nn.Module):
    """A whole model with random weights: what it computes of tokens, pixels or features."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.of = family(case)
        sizes = dict(zip(self.of.fields, SIZES[case], strict=True))
        self.model = self.of.model(self.of.config(attn_implementation="sdpa", **sizes))

    def forward(self, given: torch.Tensor) -> Any:
        return self.of.outputs(self.model, given)


@dataclass(frozen=True)
class Item:
    """A model at a size, compiled for a target."""

    case: str
    sequences: int
    tokens: int
    target: str

    @property
    def name(self) -> str:
        return f"{self.case}, {self.sequences} x {self.tokens}"

    def made(self) -> tuple[Model, torch.Tensor]:
        """Return the model with random weights, and what it is given."""
        torch.manual_seed(0)
        model, shape = Model(self.case).half().eval(), family(self.case).inputs
        if shape:
            return model, torch.randn(self.sequences, *shape).half()
        return model, torch.randint(1000, 20000, (self.sequences, self.tokens))


@cache
def imported(item: Item) -> tuple[ir.IRModule, list[torch.Tensor]]:
    """Return a model as a module of Relax, and its weights."""
    model, given = item.made()
    return as_relax(model, (given,))


def build(item: Item) -> tuple[building.Built, list[torch.Tensor]]:
    """Return a compiled model, and its weights."""
    mod, weights = imported(item)
    return building.compiled(mod, item.target), weights


class Encoders(Suite):
    """Models at fixed sizes; ours may err twice as much as torch."""

    name, device = "bench_encoders", "gpu"
    key = ("case", "sequences", "tokens")
    cases = tuple(SIZES)
    contenders = usual = ("torch", "compile", "ours")
    head = ("model", "sequences", "tokens", "torch, us", "torch.compile", "ours", "kernels")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
        parser.add_argument("--tokens", type=int, default=512, help="of a text (default 512)")

    def items(self) -> list[Item]:
        args = self.args
        return [
            Item(case, count, family(case).tokens or args.tokens, args.target)
            for case in args.cases
            for count in args.sequences
        ]

    def facts(self, item: Item) -> Entry:
        return {name: getattr(item, name) for name in self.key}

    def prepare(self, items: Sequence[Item]) -> None:
        building.fill_cache(build, items)

    @torch.no_grad()
    def measured(self, item: Item) -> Entry:
        """Return microseconds and errors of a model."""
        timing, (model, given) = self.session.timing, item.made()
        given = given.to(timing.DEVICE)
        model = model.to(timing.DEVICE)
        wide = given.double() if given.is_floating_point() else given
        exact = timing.side_by_side(model.double()(wide))
        model = model.half()
        with sdpa_kernel(FUSED):
            errors = {"torch": timing.error_of(timing.side_by_side(model(given)), exact)}
        allowed = timing.allowed_error(errors["torch"], "float16")
        kernels: list[str] = []

        def contender(name: str) -> Callable[[], Any]:
            if name == "torch":
                return lambda: model(given)
            if name == "compile":
                return under_compile(lambda: model(given), TUNED, dynamic=False)
            built, weights = build(item)
            kernels.extend(sorted({d.pattern for d in built.report.decisions if d.fused}))
            return built.call("main", [given, *(w.to(timing.DEVICE) for w in weights)])

        with sdpa_kernel(FUSED):
            found = self.session.compared(self.asked(item), contender, exact, errors, allowed)
        return {**found, "kernels": kernels}

    def intro(self, record: Entry) -> str:
        return f"{record['gpu']}; medians of CUDA graph replays, L2 flushed before each."

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        times = {name: f"{t:.1f}" for name, t in entry["us"].items()}
        cells = (times.get(name, "") for name in self.contenders)
        return *map(str, self.key_of(entry)), *cells, ", ".join(entry["kernels"])

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        found = [r for peer in ("torch", "compile") if (r := ratio(entry, peer)) is not None]
        return [(self.name_of(entry), "vs PyTorch", WORST, min(found))] if found else []

    def verdicts(self, record: Entry) -> list[Verdict]:
        found = super().verdicts(record)
        ratios = [v[3] for v in found]
        mean = geometric_mean(ratios) if ratios else 0.0
        return [*found, ("all", "mean vs PyTorch", MEAN, mean)] if found else []
