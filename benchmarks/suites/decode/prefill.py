"""Milliseconds a prompt takes: ours through the VM and as a CUDA graph, torch.compile, eager.

    python -m benchmarks run prefill [--model llama-3.1-8b] [--tokens 128 1024 4096] [--batch 1]

One run on a machine with an NVIDIA GPU.  The model is a LLaMA or GPT-2 with random weights, which
all contenders share, as they do the caches, which are empty before the prompt.  Everybody computes
logits of the last token alone.  One compilation of ours serves all numbers of tokens; PyTorch's is
of each, and has CUDA graphs of its own; its attention is causal without a mask, by the kernel that
PyTorch chooses, or by cuDNN's.  `ours` is what users call; `graph` the same as one CUDA graph.
Before anything is timed, the logits are compared with float32 ones of PyTorch.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import tvm
from tvm import relax

from benchmarks.arguments import at_least
from benchmarks.report import Entry, Verdict, two_digits
from benchmarks.suites.decode import step as steps
from benchmarks.suites.decode.step import Step, Steps
from benchmarks.targets import floor_us
from relax_fusion import models
from relax_fusion.models import ExportedModel

TOKENS = (128, 1024, 4096)
COMPILED = ("torch.compile", "torch.compile-cudnn")
LEAST = 1.0
"""How many times as fast as the best of PyTorch ours is to be."""


def floor_flops(exported: ExportedModel, batch: int, tokens: int) -> int:
    """Return the operations that a prompt cannot but take: all layers but the last, and the head.

    Of the last layer only keys and values of all tokens are needed, which are not counted.
    """
    config, before = exported.config, exported.config.num_layers - 1
    wholes = {p.name: p.shape for p in (p.whole or p for p in exported.params)}
    layers = [s for n, s in wholes.items() if len(s) == 2 and (".layers." in n or ".h." in n)]
    weights = sum(map(math.prod, layers)) // config.num_layers
    pairs = tokens * (tokens + 1) // 2
    layer = 2 * tokens * weights + 4 * pairs * config.num_heads * config.head_dim
    return batch * (before * layer + 2 * config.vocab_size * config.hidden_size)


class Prefill(Steps):
    """Prompts of some lengths, from the beginning of the caches."""

    name = "bench_prefill"
    key = ("tokens", "model", "batch", "layers", "vocab", "quantization")
    ours = ("ours", "graph")
    contenders = usual = ("eager", *COMPILED, *ours)
    head = (
        *("tokens", "floor, ms", *contenders, "host of ours", "PyTorch / ours", "/ graph"),
        *("launches a layer", "others", "error: eager", "ours", "allowed"),
    )

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        super().options(parser)
        usual = f"of a prompt (default {' '.join(map(str, TOKENS))})"
        parser.add_argument("--tokens", type=at_least(2), nargs="+", help=usual)

    @classmethod
    def check(cls, parser: ArgumentParser, args: Namespace) -> None:
        from benchmarks.suites.decode.peers import refusal

        super().check(parser, args)
        config = models.zoo_config(args.model)
        most = config.max_position
        args.tokens = args.tokens or [n for n in TOKENS if n <= most]
        if why := refusal(config, max(args.tokens)):
            parser.error(f"--model {args.model}: {why}")
        if max(args.tokens) > most:
            parser.error(f"--tokens must be at most {most}: {args.model} has no more positions")

    def items(self) -> list[int]:
        return list(self.args.tokens)

    def facts(self, item: int) -> Entry:
        return {"tokens": item, **{name: getattr(self.args, name) for name in self.key[1:]}}

    def absent(self, item: int) -> tuple[str, ...]:
        return COMPILED if self.args.no_compile else ()

    @cached_property
    def exported(self) -> ExportedModel:
        return steps.export_model(self.args, self.args.layers, "prefill", max(self.args.tokens))

    @cached_property
    def launches(self) -> dict[int, Entry]:
        """How many kernels a prompt of each length launches."""
        sizes = [{"seq_len": n, "total_len": n} for n in self.args.tokens]
        found = steps.count_launches(self.args, self.exported, "prefill", sizes)
        return dict(zip(self.args.tokens, found, strict=True))

    @cached_property
    def step(self) -> Step:
        return Step(self.exported, self.args)

    @cached_property
    def machine(self) -> Callable[..., relax.VirtualMachine]:
        return cache(self.step.machine)

    def measured(self, item: int) -> Entry:
        """Time everybody on the same weights and caches, after a comparison of their logits."""
        torch, batch = self.session.torch, self.args.batch
        drawn = torch.randint(
            self.args.vocab, (batch, item), generator=torch.Generator().manual_seed(0)
        )
        ids = tvm.runtime.tensor(drawn.int().numpy(), self.step.device)
        kernels, tokens = self.launches[item], torch.from_dlpack(ids)
        moved = steps.floor_bytes(self.exported, batch, item)
        flops = floor_flops(self.exported, batch, item)

        def contender(name: str) -> Callable[[], Any]:
            return self.contender(name, ids, tokens)

        torch._dynamo.reset()  # there is a limit of recompilations
        with torch.no_grad():
            exact = self.step.exact(tokens, item)
            self.session.free()
            eager = self.step.in_torch(tokens, item, is_compiled=False)()
            calls, found = self.compared(self.asked(item), contender, exact)
            found["errors"]["eager"] = steps.error(eager, exact)
            times = {name: self.seconds(call) for name, call in calls.items()}
        return {
            "launches": kernels,
            "floor_us": floor_us(moved, flops, self.session.ceilings["copy_tb_s"]),
            "us": {name: 1e6 * taken for name, (taken, _) in times.items()},
            "host_us": {name: 1e6 * host for name, (_, host) in times.items()},
            **found,
            **self.judged(found["errors"], self.exported.dtype),
        }

    def contender(self, name: str, ids: tvm.runtime.Tensor, tokens: Any) -> Callable[[], Any]:
        """Return a call that takes the prompt to logits, for TVM or as PyTorch's tensor."""
        total = tokens.shape[1]
        if name in self.ours:
            prefill = self.machine(graphs=name == "ours")["prefill"]
            given = ids, tvm.runtime.ShapeTuple([total]), *self.step.lists

            def call() -> Any:
                return prefill(*given)[0]

            return self.captured(call) if name == "graph" else call
        by_cudnn = name == COMPILED[1]
        return self.step.in_torch(tokens, total, is_compiled=name != "eager", by_cudnn=by_cudnn)

    def captured(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return a call as a CUDA graph."""
        made = self.session.timing.Call(call)
        if made.graph is None:
            raise RuntimeError(made.why_no_graph)
        launch: Callable[[], Any] = made.launch
        return launch

    # --- what is said ----------------------------------------------------------------------

    def intro(self, record: Entry) -> str:
        args = self.args
        stored = (
            f"{args.quantization} (PyTorch's weights decoded)" if args.quantization else "float16"
        )
        without = f", ours without {', '.join(args.without)}" if args.without else ""
        return (
            f"{record['gpu']}; {args.layers} layers of {args.model}'s widths, vocabulary "
            f"{args.vocab}, {stored}, batch {args.batch}{without}; ms, medians of {steps.REPEATS} "
            "times, L2 not flushed.  Errors are relative to the largest logit."
        )

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        def milliseconds(us: float | None) -> str:
            return "" if us is None else f"{1e-3 * us:.3f}"

        kernels, errors = entry["launches"], entry["errors"]
        worst = [errors[name] for name in self.ours if name in errors]
        shown = (errors["eager"], max(worst, default=math.nan), entry["allowed_error"])
        return (
            *(str(entry["tokens"]), milliseconds(entry["floor_us"])),
            *(milliseconds(entry["us"].get(name)) for name in self.contenders),
            *(
                milliseconds(entry["host_us"].get("ours")),
                *(two_digits(ratio(entry, who)) for who in self.ours),
            ),
            *(f"{kernels['layer']:g}", f"{kernels['rest']:g}", *(f"{e:.1e}" for e in shown)),
        )

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        ratios = {who: ratio(entry, who) for who in self.ours}
        name = self.name_of(entry)
        return [(name, f"{who} vs PyTorch", LEAST, r) for who, r in ratios.items() if r is not None]


def ratio(entry: Entry, who: str) -> float | None:
    """Return the best time of PyTorch over one of ours; None if one is missing."""
    times = entry["us"]
    best = min((times[name] for name in ("eager", *COMPILED) if name in times), default=None)
    return None if best is None or who not in times else best / times[who]
