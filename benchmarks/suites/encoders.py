"""Whole encoders of transformers on an NVIDIA GPU: ours, PyTorch, torch.compile, in one run.

    python -m benchmarks run encoders [--cases bert-small] [--sequences 1 8] [--tokens 512]

Random weights, float16, no padding. In PyTorch attention is `scaled_dot_product_attention` by one
of its fused kernels. Ours come through `torch.export` with the weights as parameters. Everything is
captured into CUDA graphs, and L2 is flushed before each replay.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from tvm import ir

from benchmarks import building
from benchmarks.exporting import as_relax
from benchmarks.report import Entry, Verdict
from benchmarks.suite import Suite
from relax_fusion.studio.bench.torch_peers import TUNED, under_compile

SIZES = {  # layers, hidden, heads, between the matmuls of an MLP
    "bert-mini": (4, 256, 4, 1024),
    "bert-small": (4, 512, 8, 2048),
    "bert-base": (12, 768, 12, 3072),
    "bert-large": (24, 1024, 16, 4096),
}
"""Of BERT's published sizes (Turc et al., 2019; Devlin et al., 2019)."""

FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""What PyTorch may compute attention by; the rest of it is several kernels."""

GOALS = {
    ("bert-small", 1): 1.2,
    **{(name, 1): 1.2 for name in ("bert-base", "bert-large")},
    **{(name, 8): 1.05 for name in ("bert-base", "bert-large")},
}
"""How many times as fast as torch.compile each is to be, by its sequences."""


class Encoder(torch.nn.Module):
    """What a model makes of tokens that are no padding: its last hidden state, without a mask.

    `BertModel.forward` makes one when it is traced or captured, for which PyTorch has no fused
    kernel.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        layers, hidden, heads, between = SIZES[name]
        config = transformers.BertConfig(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            intermediate_size=between,
            attn_implementation="sdpa",
        )
        self.model = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.model.embeddings(input_ids=tokens)
        return self.model.encoder(embedded).last_hidden_state


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

    def made(self) -> tuple[Encoder, torch.Tensor]:
        """Return the model with random weights, and tokens."""
        torch.manual_seed(0)
        model = Encoder(self.case).half().eval()
        return model, torch.randint(1000, 20000, (self.sequences, self.tokens))


@cache
def imported(item: Item) -> tuple[ir.IRModule, list[torch.Tensor]]:
    """Return a model as a module of Relax, and its weights."""
    model, tokens = item.made()
    return as_relax(model, (tokens,))


def build(item: Item) -> tuple[building.Built, list[torch.Tensor]]:
    """Return a compiled model, and its weights."""
    mod, weights = imported(item)
    return building.compiled(mod, item.target), weights


class Encoders(Suite):
    """BERT at fixed sizes; ours may err twice as much as torch."""

    name, device = "bench_encoders", "gpu"
    key = ("case", "sequences", "tokens")
    cases = tuple(SIZES)
    contenders = usual = ("torch", "compile", "ours")
    head = ("model", "sequences", "tokens", "torch, us", "torch.compile", "ours", "kernels")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
        parser.add_argument("--tokens", type=int, default=512, help="of a sequence")

    def items(self) -> list[Item]:
        args = self.args
        return [Item(c, s, args.tokens, args.target) for c in args.cases for s in args.sequences]

    def facts(self, item: Item) -> Entry:
        return {name: getattr(item, name) for name in self.key}

    def prepare(self, items: Sequence[Item]) -> None:
        building.fill_cache(build, items)

    @torch.no_grad()
    def measured(self, item: Item) -> Entry:
        """Return microseconds and errors of a model."""
        timing, (model, tokens) = self.session.timing, item.made()
        tokens = tokens.to(timing.DEVICE)
        model = model.to(timing.DEVICE)
        exact = model.double()(tokens)
        model = model.half()
        with sdpa_kernel(FUSED):
            errors = {"torch": timing.error_of(model(tokens), exact)}
        allowed = timing.allowed_error(errors["torch"], "float16")
        kernels: list[str] = []

        def contender(name: str) -> Callable[[], Any]:
            if name == "torch":
                return lambda: model(tokens)
            if name == "compile":
                return under_compile(lambda: model(tokens), TUNED, dynamic=False)
            built, weights = build(item)
            kernels.extend(sorted({d.pattern for d in built.report.decisions if d.fused}))
            return built.call("main", [tokens, *(w.to(timing.DEVICE) for w in weights)])

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
        times, case = entry["us"], (entry["case"], entry["sequences"])
        if case not in GOALS or not {"ours", "compile"} <= set(times):
            return []
        ratio = times["compile"] / times["ours"]
        return [(self.name_of(entry), "vs torch.compile", GOALS[case], ratio)]
