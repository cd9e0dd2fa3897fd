"""Models by torch.compile on an NVIDIA GPU: ours, eager, inductor in three modes, in one run.

    python -m benchmarks run compiled          # all models; max-autotune takes minutes a case
    python -m benchmarks run compiled --cases bert-base,1 --contenders ours max-autotune

Models of transformers with random weights, unmodified, float16, called as users call them: the time
of a call has Dynamo's guards and the host in it.  Encoders take 128 tokens or an image; decoders
take a token behind 512 in a `StaticCache` of 1024.  Every contender has a process of its own, with
empty caches on disk.  Some cases are prepared beside each other; when all their contenders are
ready, each is timed while the others wait.  "first" is what the first call took in seconds, beside
the others' first calls.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.report import Entry, Verdict
from benchmarks.sessions import sentence
from benchmarks.suite import Suite

Step = Callable[[Callable[..., Any]], Any]

SIZES = {  # layers, hidden, heads, between the matmuls of an MLP
    **dict.fromkeys(("bert-base", "vit-base"), (12, 768, 12, 3072)),
    "bert-large": (24, 1024, 16, 4096),
}
LLAMA = {  # beside them heads of keys and values, before the last
    "llama-3.2-1b": (16, 2048, 32, 8, 8192),
    "llama-3.1-8b-8-layers": (8, 4096, 32, 8, 14336),
}
CONTEXT, CAPACITY, STEPS = 512, 1024, 8
"""Tokens in front of the one that is timed, of the cache, and of a time."""

ENCODERS = (
    *("bert-base,1", "bert-base,8", "bert-large,1", "vit-base,1", "vit-base,8"),
    "whisper-encoder,1",
)
DECODERS = ("gpt2", *LLAMA)
ENCODER_GOAL, DECODER_GOAL, FIRST_GOAL = 1.25, 1.2, 1.0
"""How many times as fast as inductor's best mode ours is to be; and its first call."""

INDUCTOR = {
    "inductor": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune"},
}
"""The arguments of torch.compile, by contender."""

CALLS, TIMES = 24, 9
"""Calls of a time, and times of which the median counts."""


class Compiled(Suite):
    """Models by the backends of torch.compile; ours may err twice as much as eager."""

    name, device = "bench_compiled", "gpu"
    cases = (*ENCODERS, *DECODERS)
    has_target = False
    todo: list[str]
    found: dict[str, Entry]
    contenders = usual = ("ours", "eager", *INDUCTOR)
    head = ("model", *contenders, "first: ours", *INDUCTOR)

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--together", type=int, default=2, help="cases prepared beside each other (default 2)")

    def items(self) -> list[str]:
        return list(self.args.cases)

    def facts(self, item: str) -> Entry:
        return {"case": item}

    def prepare(self, items: Sequence[str]) -> None:
        self.todo, self.found = list(items), {}

    def measured(self, item: str) -> Entry:
        """Return what was found of a case; it is prepared together with the next ones."""
        if item not in self.found:
            at = self.todo.index(item)
            self.found |= self.together(self.todo[at : at + self.args.together])
        return self.found[item]

    def together(self, cases: Sequence[str]) -> dict[str, Entry]:
        """Prepare all contenders of some cases, then time one after the other."""
        device = self.session.timing.DEVICE
        asked = [(case, who) for case in cases for who in self.asked(case)]
        children = {key: Child(*key, device) for key in asked}
        ready = {key: child.hear() for key, child in children.items()}
        answers = {
            key: told if "failed" in told else told | children[key].go()
            for key, told in ready.items()
        }
        return {case: entry({w: a for (c, w), a in answers.items() if c == case}) for case in cases}

    def intro(self, record: Entry) -> str:
        return (
            f"{record['gpu']}, float16; us a call, or a token, medians of {TIMES} times by the "
            "clock of the host, and in brackets theirs over ours.  First calls in seconds."
        )

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        taken, first = entry["us"], entry["first_s"]

        def cell(who: str) -> str:
            ratio = f" ({taken[who] / taken['ours']:.2f}x)" if {who, "ours"} <= set(taken) else ""
            return f"{taken[who]:.0f}{ratio if who != 'ours' else ''}" if who in taken else ""

        times = (f"{first[who]:.1f}" if who in first else "" for who in ("ours", *INDUCTOR))
        return entry["case"], *map(cell, self.contenders), *times

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        taken, first, case = entry["us"], entry["first_s"], entry["case"]
        peers = [who for who in INDUCTOR if who in taken]
        if "ours" not in taken or not peers:
            return []
        best = min(peers, key=taken.__getitem__)
        goal = DECODER_GOAL if case in DECODERS else ENCODER_GOAL
        return [
            (case, f"vs {best}", goal, taken[best] / taken["ours"]),
            (case, f"first call vs {best}", FIRST_GOAL, first[best] / first["ours"]),
        ]


class Child:
    """A contender in a process of its own."""

    def __init__(self, case: str, who: str, device: str) -> None:
        context = get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(case, who, device, other), daemon=False)
        self.process.start()
        other.close()

    def hear(self) -> dict[str, Any]:
        """Wait for an answer; a process that ended without one has failed."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return {"failed": f"its process ended with exit code {self.process.exitcode}"}

    def go(self) -> dict[str, Any]:
        """Let the contender be timed, and wait until its process has ended."""
        with suppress(ConnectionError):
            self.pipe.send("go")
        found = self.hear()
        self.process.join()
        return found


def entry(answers: dict[str, dict[str, Any]]) -> Entry:
    """Return what contenders of a case told, by name, as an entry."""
    by = {k: {w: a[k] for w, a in answers.items() if k in a} for k in ("us", "first_s", "error")}
    allowed = 2 * by["error"].get("eager", 0.0) + 2**-10
    return {
        "us": by["us"],
        "first_s": by["first_s"],
        "errors": by["error"],
        "wrong": [w for w, e in by["error"].items() if w == "ours" and not e <= allowed],
        "failed": {w: a["failed"] for w, a in answers.items() if "failed" in a},
    }


def serve(case: str, who: str, device: str, pipe: Connection) -> None:
    """Prepare a contender, say how that went, and time it when told to."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        for name in ("RELAX_FUSION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ[name] = os.path.join(folder, name.lower())
        torch.set_grad_enabled(False)
        try:
            call, per, found = prepared(case, who, device)
        except Exception as err:
            pipe.send({"failed": sentence(err)})
            return
        pipe.send(found)
        pipe.recv()
        pipe.send({"us": 1e6 * statistics.median(call() for _ in range(TIMES)) / per})


def prepared(case: str, who: str, device: str) -> tuple[Callable[[], float], int, dict[str, Any]]:
    """Return what gives the seconds of some calls, how many these are, and what is known so far."""
    import torch

    torch.manual_seed(0)
    model = made(case, device)
    exact = use(case, model.float(), device)[0](model.forward)
    step, reset = use(case, model.half(), device)
    call = model.forward if who == "eager" else compiled(model.forward, who)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    began = time.perf_counter()
    step(call)
    wait()
    first = time.perf_counter() - began
    count = STEPS if case in DECODERS else CALLS

    def seconds() -> float:
        reset()
        wait()
        start = time.perf_counter()
        for _ in range(count):
            step(call)
        wait()
        return time.perf_counter() - start

    for _ in range(3):
        seconds()
    reset()
    error = (step(call).float() - exact).abs().max() / exact.abs().max()
    return seconds, count, {"first_s": first, "error": float(error)}


def made(case: str, device: str) -> Any:
    """Return a model of transformers with random weights that float16 holds."""
    import torch
    import transformers as hf

    name = case.partition(",")[0]
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    with torch.device(device):
        if name.startswith("bert"):
            config = hf.BertConfig(**dict(zip(sizes, SIZES[name], strict=True)))
            model = hf.BertModel(config, add_pooling_layer=False)
        elif name.startswith("vit"):
            config = hf.ViTConfig(**dict(zip(sizes, SIZES[name], strict=True)))
            model = hf.ViTModel(config, add_pooling_layer=False)
        elif name == "gpt2":
            model = hf.GPT2LMHeadModel(hf.GPT2Config())
        elif name == "whisper-encoder":
            model = hf.WhisperModel(hf.WhisperConfig()).encoder
        else:
            more = {"vocab_size": 32000, "max_position_embeddings": 4096}
            names = (*sizes[:3], "num_key_value_heads", sizes[3])
            config = hf.LlamaConfig(**dict(zip(names, LLAMA[case], strict=True)), **more)
            model = hf.LlamaForCausalLM(config)
    return model.eval().half()


def use(case: str, model: Any, device: str) -> tuple[Step, Callable[[], None]]:
    """Return what calls a model's forward, and what must be done before a row of calls."""
    import torch
    from transformers import StaticCache

    torch.manual_seed(1)
    count = 1 if case in DECODERS else int(case.rpartition(",")[2])
    with torch.device(device):
        ids = torch.randint(0, 30000, (count, CONTEXT + 1))
        at = torch.tensor([[CONTEXT]])
    if case in DECODERS:
        cache = StaticCache(config=model.config, max_cache_len=CAPACITY)
        model(ids[:, :CONTEXT], past_key_values=cache, use_cache=True)
        last = ids[:, CONTEXT:].contiguous()

        def reset() -> None:
            for layer in cache.layers:
                layer.cumulative_length.fill_(CONTEXT)

        given = {"past_key_values": cache, "use_cache": True, "position_ids": at}
        return lambda call: call(last, **given).logits, reset
    if case.startswith("bert"):
        inputs = {"input_ids": ids[:, :128].contiguous()}
    else:
        name, shape = ("pixel_values", (3, 224, 224))
        if case.startswith("whisper"):
            name, shape = "input_features", (80, 3000)
        inputs = {name: torch.randn(count, *shape, device=device).to(model.dtype)}
    return lambda call: call(**inputs).last_hidden_state, lambda: None


def compiled(forward: Callable[..., Any], who: str) -> Callable[..., Any]:
    """Return a forward by a backend of torch.compile."""
    import torch

    if who in INDUCTOR:
        return torch.compile(forward, fullgraph=True, **INDUCTOR[who])
    import relax_fusion.torch as door

    return torch.compile(forward, fullgraph=True, backend=door.relax_fusion)
