"""``relax-fusion demo``: TVM's pipeline and ours, side by side, with nothing but the install."""

from __future__ import annotations

import argparse
import textwrap
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from statistics import median
from typing import Any

from tvm import relax

from ..cli.build import build, build_default, cuda_kernels
from ..cli.console import Console, first_line
from ..cli.explain import summary
from ..estimator import format_seconds
from ..hardware.target import device_of, host_target, make_target
from ..models import Config, ExportedModel, Generator, export, random_weights, zoo_config
from ..models.threads import use_all_cores
from ..models.zoo import CONFIGS
from ..report import Report
from ..report.tables import table
from ..timing import timed
from ..transforms.modules import module_of
from .measure import Session, compare, decoded, tokens
from .report_page import fold_layers

PROMPT = 16
"""The prompt has this many tokens; torch and ours are timed by it."""

TURNS, STEPS = 5, 8
"""Ours and torch feed a prompt so often, and so many tokens after each.  TVM's default pipeline
needs about a second for each token on two cores: it runs one, and one after it, once.  Ours runs
them too, to be compared."""

WIDTH = 100
"""The printed text has this many columns."""


@dataclass(frozen=True)
class Run:
    """Median seconds of a prompt and of a token after it, and those that compiling took."""

    prefill: float
    decode: float
    compile_s: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """One model, compiled twice."""

    name: str
    report: Report
    default: Run
    fused: Run
    worst: float
    tolerance: float
    torch: Run | None = None
    operators: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether no logit differs by more than rounding can explain."""
        return self.worst <= self.tolerance  # false for NaN as well

    @property
    def record(self) -> dict[str, Any]:
        """The comparison as JSON."""
        runs = {"tvm_default": self.default, "relax_fusion": self.fused}
        if self.torch is not None:
            runs["torch"] = self.torch
        return {
            "model": self.name,
            "agrees": self.agrees,
            "largest_difference": self.worst,
            "tolerance": self.tolerance,
            "prompt_tokens": PROMPT,
            "prefill_s": {name: run.prefill for name, run in runs.items()},
            "extrapolated": ["prefill_s of tvm_default"],
            "decode_s": {name: run.decode for name, run in runs.items()},
            "compile_s": {name: run.compile_s for name, run in runs.items()},
            **summary(self.report),
        }


def demo_command(args: argparse.Namespace, console: Console) -> int:
    """Compare on this machine, cross-compile for another, print a table."""
    use_all_cores()  # before TVM has made its threads
    start = time.perf_counter()
    device = device_of(host_target())
    console.step(f"this machine: {device.label}")
    comparisons = []
    for name in ("demo-llama", "demo-gpt2"):
        comparison = _compare(name, _config(name, args.quick), console)
        comparisons.append(comparison)
    cross = _cross_compile(_config("demo-llama", args.quick), console)
    seconds = time.perf_counter() - start
    if args.json:
        models = [c.record for c in comparisons]
        console.json({"models": models, "cross_compile": cross, "seconds": round(seconds, 1)})
    else:
        console.result(_end(comparisons, cross, seconds))
    return 0 if all(c.agrees for c in comparisons) else 1


def _config(name: str, quick: bool) -> Config:
    config = zoo_config(name)
    if not quick:
        return config
    sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512}
    sizes |= {"num_heads": 4, "num_layers": 1}
    if config.family == "llama":
        sizes |= {"num_kv_heads": 2}
    return replace(config, **sizes)


def _compare(name: str, config: Config, console: Console) -> Comparison:
    """Compile a model in both ways and run both with the same weights and tokens."""
    target = host_target()
    exported = export(config, max_seq_len=128)
    count = sum(prod(param.shape) for param in exported.params)
    console.step(f"{name}: making {count / 1e6:.0f} M random weights")
    weights = random_weights(exported)
    console.step(f"{name}: compiling with TVM's default pipeline")
    two = tokens(2, config.vocab_size)[None]
    executable, compile_s = timed(lambda: build_default(exported, target))
    console.step(f"{name}: running two tokens with it, by naive loops")
    turn, theirs = decoded(Generator(executable, exported, weights), two, 1)
    default = Run(PROMPT * turn["prefill"][0], turn["decode"][0], compile_s)
    console.step(f"{name}: compiling with relax_fusion")
    report = Report()
    executable, compile_s = timed(lambda: build(exported, target, report=report))
    console.step(f"{name}: running it")
    ours = Generator(executable, exported, weights)
    worst, tolerance = compare(theirs, decoded(ours, two, 1)[1], exported)
    fused = replace(_run(ours, config.vocab_size), compile_s=compile_s)
    torch = _in_torch(name, exported, weights, console) if config == zoo_config(name) else None
    operators = _operators(exported.mod["decode"])
    return Comparison(name, report, default, fused, worst, tolerance, torch, operators)


def _run(session: Session, vocabulary: int) -> Run:
    """Time a prompt and tokens after it; a token in front wakes the threads."""
    ids = tokens(PROMPT + STEPS, vocabulary)[None]
    session.reset()
    session.decode(ids[:, 0])
    turns = [decoded(session, ids, PROMPT)[0] for _ in range(TURNS)]
    prefill, decode = ([s for turn in turns for s in turn[step]] for step in ("prefill", "decode"))
    return Run(median(prefill), median(decode))


def _in_torch(
    name: str, exported: ExportedModel, weights: list[Any], console: Console
) -> Run | None:
    """Run the model in torch, if it is installed and has it; what fails there is only told."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        return None
    console.step(f"{name}: running it in torch, operator by operator")
    try:
        from .bench.torch_peers import eager_decoder

        session = eager_decoder(CONFIGS[name], exported, weights)
        return _run(session, exported.config.vocab_size)
    except Exception as err:  # of another library, which the demo does without
        console.warn(f"torch does not run {name}: {first_line(err)}")
        return None


def _operators(function: relax.Function) -> tuple[str, ...]:
    """Return the names of the operators of a function, in their order."""
    values = [binding.value for block in function.body.blocks for binding in block.bindings]
    calls = [value for value in values if isinstance(value, relax.Call)]
    return tuple(str(getattr(call.op, "name", "call")).rpartition(".")[2] for call in calls)


def _one_token(model: ExportedModel) -> ExportedModel:
    """Return a decoder without the function of a prompt, whose many sizes take many kernels."""
    functions = {g: f for g, f in model.mod.functions_items() if g.name_hint != "prefill"}
    names = tuple(name for name in model.functions if name != "prefill")
    return replace(model, mod=module_of(functions), functions=names)


def _cross_compile(config: Config, console: Console) -> dict[str, Any]:
    """Compile for a GPU that need not be here."""
    console.step("demo-llama: cross-compiling for H200, float16")
    exported = _one_token(export(config, dtype="float16", max_seq_len=1024))
    report = Report()
    target = make_target("h200")
    executable, seconds = timed(lambda: build(exported, target, report=report))
    kernels = cuda_kernels(executable)
    return {
        "model": "demo-llama",
        "target": "h200",
        "arch": str(target.attrs["arch"]),
        "seconds": round(seconds, 2),
        "cuda_kernels": len(kernels),
        "functions": list(exported.functions),
        **summary(report),
    }


def _end(comparisons: list[Comparison], cross: dict[str, Any], seconds: float) -> str:
    parts = [_times(comparisons), *map(_agreement, comparisons), _layer(comparisons[0])]
    fused = sum(cross["fused"].values())
    parts.append(
        f"Cross-compiled {' and '.join(cross['functions'])} of {cross['model']} (float16) for an "
        f"H200 in {cross['seconds']:.1f} s, without a GPU:\n{cross['cuda_kernels']} CUDA kernels "
        f"for {cross['arch']}, with {fused} chains fused."
    )
    parts.append(NEXT)
    return "\n" + "\n\n".join(parts) + f"\n\nAll of it took {seconds:.0f} s."


NEXT = """What to do next:
  relax-fusion explain demo-llama                   what was fused, what was not, and why
  relax-fusion explain demo-llama --target h200     the same for a GPU that need not be here
  relax-fusion compile path/to/model -o out         a model of yours: a directory of Hugging Face,
                                                    .pt2 or .onnx
  relax-fusion bench out                            its times, beside TVM's and torch's"""


def _times(comparisons: list[Comparison]) -> str:
    has_torch = any(c.torch for c in comparisons)
    head = ("model", "step", "relax_fusion", "TVM default", "speed-up")
    rows: list[tuple[str, ...]] = [(*head, *["torch", "speed-up"] * has_torch)]
    for c in comparisons:
        runs = [c.default, *([] if c.torch is None else [c.torch])]
        for step, ours, theirs in (
            (f"prefill, {PROMPT} tokens", c.fused.prefill, [run.prefill for run in runs]),
            ("decode, per token", c.fused.decode, [run.decode for run in runs]),
        ):
            row = [c.name, step, format_seconds(ours)]
            for seconds in theirs:
                row += [format_seconds(seconds), f"{seconds / ours:.1f}x"]
            rows.append((*row, *[""] * (len(rows[0]) - len(row))))
    note = (
        f"TVM's default pipeline ran one token, whose time is multiplied by {PROMPT} for a prompt."
    )
    return f"{table(rows)}\n{note}"


def _agreement(c: Comparison) -> str:
    verdict = "agree" if c.agrees else "DISAGREE"
    return (
        f"{c.name}: outputs {verdict}: the logits differ by at most {c.worst:.1e}; rounding "
        f"explains up to {c.tolerance:.1e}"
    )


def _layer(c: Comparison) -> str:
    """Show the operators of a layer, and the kernels that take their place."""
    kernels = next((made.kernels for made in c.report.launches if made.function == "decode"), ())
    lines = [f"One layer of {c.name}, a token at a time:"]
    for when, what, every in (("before", "operators", c.operators), ("after", "kernels", kernels)):
        start, length, _ = fold_layers(every)
        told = f"  {when}, {length} {what}: {', '.join(every[start : start + length])}"
        lines += textwrap.wrap(told, WIDTH, subsequent_indent=" " * 4, break_long_words=False)
    return "\n".join(lines)
