"""What suites of whole steps share: a model with random weights, its caches, and who runs them."""

from __future__ import annotations

import math
import re
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from benchmarks.report import Entry
from benchmarks.sessions import sentence
from benchmarks.suite import Suite
from benchmarks.suites.decode.launches import Sizes, launches, lowered
from benchmarks.suites.decode.weights import random_weights
from relax_fusion import make_target, models
from relax_fusion.canonical import CANONICAL
from relax_fusion.errors import ConfigError
from relax_fusion.models import ExportedModel
from relax_fusion.passes import PATTERNS
from relax_fusion.quantization import QUANTIZATIONS
from relax_fusion.timing import host_and_device, timed
from relax_fusion.workload.reference import numpy_dtype

CALLS, REPEATS, SECONDS = 20, 9, 0.25
"""Calls of a time, fewer where they take longer than so many seconds; times of which the median
counts."""

MODEL = "llama-3.1-8b"


def export_model(
    args: Namespace, layers: int, name: str, length: int, shards: int = 1
) -> ExportedModel:
    """Return a model with one of its functions: kernels of others would only take time."""
    config = replace(models.zoo_config(args.model), num_layers=layers, vocab_size=args.vocab)
    stored = args.quantization or None
    dtype = None if stored else "float16"
    sizes = {"max_seq_len": length, "batch": args.batch, "shards": shards}
    made = models.export(config, dtype=dtype, quantization=stored, **sizes)
    for other in set(made.functions) - {name}:
        del made.mod[other]
    return made


def floor_bytes(exported: ExportedModel, batch: int, total: int) -> int:
    """Return the bytes that a step cannot but touch: weights, and `total` keys and values.

    Of a model that is spread they are those of a worker.  Of experts, those count that so many
    tokens choose where each chooses at random.
    """
    config = exported.config
    skipped = ("model.rope", "transformer.wpe")
    skipped += () if config.tie_word_embeddings else ("model.embed", "transformer.wte")
    cached = config.num_layers, 2, batch, total, *map(int, exported.cache_shapes[0][2:])
    moved = float(math.prod(cached) * numpy_dtype(exported.dtype).itemsize)
    experts = getattr(config, "experts", None)
    share = 1 - (1 - experts.chosen / experts.count) ** batch if experts else 1
    for param in exported.params:
        if not param.name.startswith(skipped):
            parts = re.match(r"model\.layers\.(\d+)\.mlp\.(gate_up|down)_proj", param.name)
            chosen = experts and parts and experts.at(int(parts[1]))
            size = math.prod(param.shape) * numpy_dtype(param.dtype).itemsize
            moved += size * (share if chosen else 1)
    return round(moved)


def count_launches(
    args: Namespace, whole: ExportedModel, name: str, sizes: Iterable[Sizes]
) -> list[dict[str, float]]:
    """Return the launches of a layer and of the rest of a call, for each of some sizes."""
    target = make_target(args.target)
    one = export_model(args, 1, name, whole.max_seq_len)
    less, more = (lowered(e.mod, target, disable=tuple(args.without)) for e in (one, whole))
    found = []
    for at in sizes:
        (few, few_inside), (many, many_inside) = (launches(m, name, at) for m in (less, more))
        layer = (many - few) / (args.layers - 1)
        inside = (many_inside - few_inside) / (args.layers - 1)
        rest = many - layer * args.layers
        found.append({"layer": layer, "layer_in_graphs": inside, "rest": rest})
    return found


def error(got: Any, exact: Any) -> float:
    """Return the largest error of the logits over the largest logit."""
    return float((got.float().reshape(exact.shape) - exact).abs().max() / exact.abs().max())


class Step:
    """What all contenders share: a model's weights and caches, on the GPU."""

    def __init__(self, exported: ExportedModel, args: Namespace) -> None:
        import torch

        self.exported, self.args, self.device = exported, args, tvm.cuda(0)
        rng = np.random.default_rng(1)
        arrays, whole = random_weights(exported)
        self.params = [tvm.runtime.tensor(array, self.device) for array in arrays]
        shapes = [tuple(map(int, shape)) for shape in exported.cache_shapes]
        drawn = (rng.standard_normal(shape, "float32") for shape in shapes)
        stored = numpy_dtype(exported.dtype)
        self.caches = [tvm.runtime.tensor(a.astype(stored), self.device) for a in drawn]
        self.twins = [torch.from_dlpack(t) for t in self.caches]
        there = {id(array): param for array, param in zip(arrays, self.params, strict=True)}
        self.weights = {
            name: torch.from_dlpack(
                there[id(array)] if id(array) in there else tvm.runtime.tensor(array, self.device)
            )
            for name, array in whole.items()
            if not name.startswith("model.rope")
        }
        # Lists are converted once, not in every call
        self.lists = [tvm_ffi.convert(list(values)) for values in (self.caches, self.params)]

    def exact(self, ids: Any, total: int) -> Any:
        """Return the logits in float32."""
        return self._peer(ids, total, [cache.float() for cache in self.twins])(ids)

    def in_torch(
        self, ids: Any, total: int, *, is_compiled: bool, by_cudnn: bool = False
    ) -> Callable[[], Any]:
        """Return PyTorch's step, as it is or by torch.compile, perhaps with cuDNN's attention."""
        import torch
        from torch._inductor import select_algorithm

        step = self._peer(ids, total, self.twins, by_cudnn)
        if is_compiled:
            select_algorithm.PRINT_AUTOTUNE = False
            step = torch.compile(step, mode="max-autotune", dynamic=False)
        return lambda: step(ids)

    def _peer(self, ids: Any, total: int, caches: list[Any], by_cudnn: bool = False) -> Any:
        from benchmarks.suites.decode.peers import peer

        return peer(self.exported.config, self.weights, caches, total, ids.shape[1], by_cudnn)

    def machine(self, *, graphs: bool) -> relax.VirtualMachine:
        """Return our compiled module, with CUDA graphs of its own or without."""
        target, options = make_target(self.args.target), {"disable": tuple(self.args.without)}
        pipeline = relax.get_pipeline(
            "relax_fusion", target=target, use_cuda_graph=graphs, **options
        )
        made = tvm.compile(self.exported.mod, target, relax_pipeline=pipeline)
        return relax.VirtualMachine(made, self.device)


class Steps(Suite):
    """A step of a decoder, PyTorch's and ours on the same weights and caches."""

    device = "gpu"
    plain: ClassVar = {"batch": "", "model": MODEL, "quantization": "", "without": ""}

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--model", default=MODEL, help="a decoder of relax_fusion.models.zoo")
        add("--layers", type=int, help="of the model, all by default")
        add("--batch", type=int, default=1)
        add("--vocab", type=int, help="of the model by default")
        add("--quantization", default="", choices=("", *QUANTIZATIONS), help="of our weights")
        help_ = "passes that our pipeline leaves out"
        add(
            "--without",
            nargs="+",
            default=[],
            choices=(*CANONICAL, *PATTERNS),
            metavar="PASS",
            help=help_,
        )
        add("--no-compile", action="store_true", help="leave out torch.compile")

    @classmethod
    def check(cls, parser: ArgumentParser, args: Namespace) -> None:
        from benchmarks.suites.decode.peers import refusal

        try:
            config = models.zoo_config(args.model)
        except ConfigError as err:
            parser.error(f"--model: {err}")
        if why := refusal(config, args.batch):
            parser.error(f"--model {args.model}: {why}")
        args.layers = config.num_layers if args.layers is None else args.layers
        args.vocab = config.vocab_size if args.vocab is None else args.vocab
        if args.layers < 2:
            parser.error("--layers must be at least 2: what a layer adds is a difference")

    def kind(self) -> Entry:
        of = {"model": self.args.model, "quantization": self.args.quantization}
        without = "_".join(["without", *self.args.without]) if self.args.without else ""
        return {"batch": f"batch{self.args.batch}", **of, "without": without}

    def compared(
        self,
        names: Iterable[str],
        contender: Callable[[str], Callable[[], Any]],
        exact: Any,
        restart: Callable[[], None] = lambda: None,
    ) -> tuple[dict[str, Callable[[], Any]], Entry]:
        """Return the contenders that run, and what an entry says of them but their times.

        What a contender's first call takes counts as its compilation.
        """
        sync, calls = self.session.torch.cuda.synchronize, {}
        found: dict[str, dict[str, Any]] = {"compile_s": {}, "errors": {}, "failed": {}}
        for name in names:
            try:
                began = time.perf_counter()
                calls[name] = contender(name)
                for number in range(3):  # the last are replays
                    restart()
                    got = calls[name]()
                    sync()
                    if number == 0 and name != "eager":
                        found["compile_s"][name] = time.perf_counter() - began
                found["errors"][name] = error(self.session.timing.as_torch(got).clone(), exact)
            except Exception as err:
                self.session.check(err)
                found["failed"][name] = sentence(err)
                calls.pop(name, None)
        return calls, found

    def judged(self, errors: dict[str, float], dtype: str) -> Entry:
        """Return how large errors of ours may be, and whose are larger."""
        allowed = self.session.timing.allowed_error(errors["eager"], dtype)
        wrong = [name for name in self.ours if not errors.get(name, 0) <= allowed]
        return {"allowed_error": allowed, "wrong": wrong}

    def seconds(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Return what a call takes, and what the host has of it to do."""
        sync = self.session.torch.cuda.synchronize

        def once() -> None:
            call()
            sync()

        calls = max(1, min(CALLS, int(SECONDS / timed(once)[1])))
        host, device = host_and_device(call, sync, calls, REPEATS)
        return statistics.median(device), statistics.median(host)
