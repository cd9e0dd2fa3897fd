"""Seconds a decoded token takes through the VM: CUDA graphs on and off, torch.compile, the floor.

One run on a machine with an NVIDIA GPU.  The model is a LLaMA with random weights, which all
contenders share, as they do the caches; with --quantization PyTorch's are what ours decode to.
Every token is at the same position, with a full context: ours counts its place up, and stays at the
last row of its caches.  The floor is the bytes of the weights and caches that a token reads, over
the bandwidth of a copy in the same run.  Before anything is timed, the logits of every contender
are compared with float32 ones of PyTorch.
"""

from __future__ import annotations

import math
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from benchmarks.recording import markdown_table
from benchmarks.report import Entry, problems
from benchmarks.sessions import sentence
from benchmarks.suite import Suite
from benchmarks.suites.decode.launches import launches
from benchmarks.suites.decode.weights import random_weights
from benchmarks.targets import floor_us
from relax_fusion import make_target, models
from relax_fusion.models import ExportedModel
from relax_fusion.quantization import QUANTIZATIONS
from relax_fusion.timing import host_and_device
from relax_fusion.workload.reference import numpy_dtype

CALLS, REPEATS = 20, 9
MODELS = ("llama-3.1-8b", "llama-3.2-1b")
TORCH = ("eager", "torch.compile")


def decode_only(exported: ExportedModel) -> ExportedModel:
    """Return the model without ``prefill``, whose kernels would only take time to compile."""
    del exported.mod["prefill"]
    return exported


def floor_bytes(exported: ExportedModel, batch: int, total: int) -> int:
    """Return the bytes that a token cannot but read: weights, and keys and values so far."""
    config = exported.config
    skipped = ("model.rope",) if config.tie_word_embeddings else ("model.rope", "model.embed")
    read = [(p.shape, p.dtype) for p in exported.params if not p.name.startswith(skipped)]
    cached = config.num_layers, 2, batch, total, config.num_kv_heads, config.head_dim
    read.append((cached, exported.dtype))
    return sum(math.prod(shape) * numpy_dtype(dtype).itemsize for shape, dtype in read)


class Step:
    """What all contenders share: weights, caches and tokens, at one position."""

    def __init__(self, exported: ExportedModel, args: Namespace) -> None:
        import torch

        self.exported, self.args, self.total = exported, args, args.context + 1
        dev, rng = tvm.cuda(0), np.random.default_rng(1)
        arrays, whole = random_weights(exported)
        self.params = [tvm.runtime.tensor(array, dev) for array in arrays]
        shapes = [tuple(map(int, shape)) for shape in exported.cache_shapes]
        drawn = (rng.standard_normal(shape, "float32") for shape in shapes)
        stored = numpy_dtype(exported.dtype)
        self.caches = [tvm.runtime.tensor(array.astype(stored), dev) for array in drawn]
        self.first = np.arange(args.batch, dtype="int32")[:, None] + 7
        self.ids = tvm.runtime.tensor(self.first, dev)
        self.length = tvm.runtime.tensor(np.array([args.context], "int32"), dev)
        self.tokens = torch.from_dlpack(self.ids)
        self.twins = [torch.from_dlpack(t) for t in self.caches]
        self.weights = {
            name: torch.from_dlpack(tvm.runtime.tensor(array, dev))
            for name, array in whole.items()
            if not name.startswith("model.rope")
        }
        self.compile_s: dict[str, float] = {}

    def exact(self) -> Any:
        """Return the logits in float32."""
        from benchmarks.suites.decode.peers import Decoder

        wide = {name: value.float() for name, value in self.weights.items()}
        caches = [cache.float() for cache in self.twins]
        return Decoder(self.exported.config, wide, caches, self.total)(self.tokens)

    def restart(self) -> None:
        """Forget what steps of ours have written: tokens, and their place."""
        self.ids.copyfrom(self.first)
        self.length.copyfrom(np.array([self.args.context], "int32"))

    def contender(self, name: str, sync: Callable[[], Any]) -> Callable[[], Any]:
        """Return the step as a function of nothing, and keep what compiling it took."""
        began = time.perf_counter()
        call = self.in_torch(name) if name in TORCH else self.ours(graphs=name == "graphs")
        if name != "eager":
            call()
            sync()
            self.compile_s[name] = time.perf_counter() - began
        return call

    def in_torch(self, name: str) -> Callable[[], Any]:
        import torch

        from benchmarks.suites.decode.peers import Decoder

        step = Decoder(self.exported.config, self.weights, self.twins, self.total)
        if name != "eager":
            step = torch.compile(step, mode="max-autotune", dynamic=False)
        return lambda: step(self.tokens)

    def ours(self, *, graphs: bool) -> Callable[[], Any]:
        target = make_target(self.args.target)
        pipeline = relax.get_pipeline("relax_fusion", target=target, use_cuda_graph=graphs)
        made = tvm.compile(self.exported.mod, target, relax_pipeline=pipeline)
        decode = relax.VirtualMachine(made, tvm.cuda(0))["decode"]
        # Lists are converted once, not in every call
        lists = (tvm_ffi.convert(list(values)) for values in (self.caches, self.params))
        arguments = self.ids, self.length, tvm.runtime.ShapeTuple([self.total]), *lists
        return lambda: decode(*arguments)[0]


def error(got: Any, exact: Any) -> float:
    """Return the largest error of the logits over the largest logit."""
    return float((got.float().reshape(exact.shape) - exact).abs().max() / exact.abs().max())


def export_model(args: Namespace, layers: int) -> ExportedModel:
    config = replace(models.zoo_config(args.model), num_layers=layers, vocab_size=args.vocab)
    length, stored = args.context + 1, args.quantization or None
    dtype = None if stored else "float16"
    made = models.export(
        config, dtype=dtype, max_seq_len=length, batch=args.batch, quantization=stored
    )
    return decode_only(made)


def count_launches(args: Namespace, exported: ExportedModel) -> dict[str, float]:
    """Return the launches of a layer and of the rest of a token."""
    target = make_target(args.target)
    (one, one_in), (all_, all_in) = (launches(e, target) for e in (export_model(args, 1), exported))
    layer = (all_ - one) / (args.layers - 1)
    inside = (all_in - one_in) / (args.layers - 1)
    return {"layer": layer, "layer_in_graphs": inside, "rest": all_ - layer * args.layers}


class Decode(Suite):
    """One token, at one position."""

    name, device = "bench_decode", "gpu"
    plain: ClassVar = {"batch": "", "model": MODELS[0], "quantization": ""}
    key = ("model", "batch", "context", "layers", "vocab", "quantization")
    ours = ("graphs", "no graphs")
    contenders = usual = ("eager", *ours, "torch.compile")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--model", default=MODELS[0], choices=MODELS, help="widths, layers and vocabulary")
        add("--layers", type=int, help="of the model, all by default")
        add("--batch", type=int, default=1)
        add("--context", type=int, default=1024, help="tokens before this one")
        add("--vocab", type=int, help="of the model by default")
        add("--quantization", default="", choices=("", *QUANTIZATIONS), help="of our weights")
        add("--no-compile", action="store_true", help="leave out torch.compile")

    @classmethod
    def check(cls, parser: ArgumentParser, args: Namespace) -> None:
        config = models.zoo_config(args.model)
        args.layers = config.num_layers if args.layers is None else args.layers
        args.vocab = config.vocab_size if args.vocab is None else args.vocab
        if args.layers < 2:
            parser.error("--layers must be at least 2: what a layer adds is a difference")

    def kind(self) -> Entry:
        of = {"model": self.args.model, "quantization": self.args.quantization}
        return {"batch": f"batch{self.args.batch}", **of}

    def items(self) -> list[Namespace]:
        return [self.args]

    def facts(self, item: Namespace) -> Entry:
        return {name: getattr(item, name) for name in self.key}

    def absent(self, item: Namespace) -> list[str]:
        return ["torch.compile"] * item.no_compile

    def is_complete(self, entry: Entry, item: Namespace) -> bool:
        return set(self.asked(item)) <= set(entry.get("times", ()))

    def measured(self, item: Namespace) -> Entry:
        """Time everybody on the same weights and caches, after a comparison of their logits."""
        exported, torch = export_model(item, item.layers), self.session.torch
        sync = torch.cuda.synchronize
        found = {
            "launches": count_launches(item, exported),
            "floor_bytes": floor_bytes(exported, item.batch, item.context + 1),
        }
        self.session.free()
        step = Step(exported, item)
        errors, times, failed = {}, {}, {}
        with torch.no_grad():
            exact = step.exact()
            self.session.free()
            errors["eager"] = error(step.in_torch("eager")(), exact)
            calls = {}
            for name in self.asked(item):
                try:
                    calls[name] = step.contender(name, sync)
                    for _ in range(2):  # the second is a replay
                        step.restart()
                        got = calls[name]()
                        sync()
                    errors[name] = error(self.session.timing.as_torch(got).clone(), exact)
                except Exception as err:
                    self.session.check(err)
                    failed[name] = sentence(err)
                    calls.pop(name, None)
            for name, call in calls.items():
                host, device = host_and_device(call, sync, CALLS, REPEATS)
                seconds = map(statistics.median, (device, host))
                times[name] = dict(zip(("token_s", "host_s"), seconds, strict=True))
        allowed = self.session.timing.allowed_error(errors["eager"], exported.dtype)
        return {
            **found,
            "floor_s": 1e-6 * floor_us(found["floor_bytes"], 0, self.session.ceilings["copy_tb_s"]),
            "times": times,
            "compile_s": step.compile_s,
            "errors": errors,
            "allowed_error": allowed,
            "failed": failed,
            "wrong": [name for name in self.ours if not errors.get(name, 0) <= allowed],
        }

    # --- what is said ----------------------------------------------------------------------

    def line(self, entry: Entry, record: Entry) -> str:
        if "error" in entry:
            return super().line(entry, record)
        return ", ".join(f"{n} {1e3 * t['token_s']:.3f} ms" for n, t in entry["times"].items())

    def markdown(self, record: Entry) -> str:
        found = [report(e, record) for e in record["cases"] if "error" not in e]
        found.append(problems(record["cases"], self.name_of, lambda e, n: f"{e['errors'][n]:.1e}"))
        return "\n\n".join(text for text in found if text)


def report(entry: Entry, record: Entry) -> str:
    """Return an entry as Markdown."""
    floor = entry["floor_s"]
    rows = [("", "ms a token", "of it the host's", "of the floor's speed", "error")]
    for name, taken in entry["times"].items():
        token = taken["token_s"]
        cells = (f"{1e3 * token:.3f}", f"{1e3 * taken['host_s']:.3f}", f"{floor / token:.0%}")
        rows.append((name, *cells, f"{entry['errors'][name]:.1e}"))
    rows.append(("floor", f"{1e3 * floor:.3f}", "", "100%", ""))
    kernels = entry["launches"]
    name = entry.get("quantization")
    stored = f"{name} (PyTorch's weights decoded)" if name else "float16"
    verdict = "\n\n**The error of ours is larger than allowed.**" if entry["wrong"] else ""
    return (
        f"{record['gpu']}; {entry['layers']} layers of {entry['model']}'s widths, vocabulary "
        f"{entry['vocab']}, {stored}, batch {entry['batch']}, context {entry['context']}; median "
        f"of {REPEATS} x {CALLS} tokens, L2 not flushed.\n\n"
        f"{markdown_table(rows)}\n\n"
        f"A layer is {kernels['layer']:g} launches, {kernels['layer_in_graphs']:g} of them in "
        f"graphs; {kernels['rest']:g} more a token. The floor is {entry['floor_bytes'] / 1e9:.2f} "
        f"GB at {record['copy_tb_s']:.2f} TB/s. Errors are relative to the largest logit; ours may "
        f"be {entry['allowed_error']:.1e}.{verdict}"
    )
