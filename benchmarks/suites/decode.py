"""Seconds a decoded token takes through the VM: CUDA graphs on and off, torch.compile, the floor.

One run on a machine with an NVIDIA GPU.  The model is a LLaMA of few layers with the widths of
LLaMA-3.1-8B and random weights, which all contenders share, as they do the caches.  Every token is
at the same position, with a full context.  The floor is the bytes of the weights and caches that a
token reads, over the bandwidth of a copy in the same run.  Before anything is timed, the logits of
every contender are compared with float32 ones of PyTorch.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from benchmarks import recording
from relax_fusion import PipelineOptions, make_target, models
from relax_fusion.cuda_graph import is_run_or_capture
from relax_fusion.models import ExportedModel
from relax_fusion.pattern import is_call
from relax_fusion.pipeline import PHASES
from relax_fusion.triton_bridge.prim_func import KERNELS_ATTR

CALLS, REPEATS, WARMUP = 20, 9, 3
RANDOM_ELEMENTS = 1 << 22


# --- what is launched ------------------------------------------------------------------------


def decode_only(exported: ExportedModel) -> ExportedModel:
    """Return the model without ``prefill``, whose kernels would only take time to compile."""
    del exported.mod["prefill"]
    return exported


def launches(exported: ExportedModel, target: tvm.target.Target) -> tuple[int, int]:
    """Return how many kernels a call of ``decode`` launches, and how many of them from graphs."""
    options = PipelineOptions(target)
    mod = exported.mod
    with target:
        for _, phase, _ in PHASES[:5]:
            mod = tvm.transform.Sequential(phase(options))(mod)
        for step in PHASES[5][1](options):
            mod = step(mod)
            if step.info.name == "CaptureCUDAGraphs":
                break
    decode = mod["decode"]
    inside = sum(_launches(mod, mod[b.value.args[1].fields[0]]) for b in _replays(decode))
    return _launches(mod, decode) + inside, inside


def _replays(func: relax.Function) -> list[relax.VarBinding]:
    return [b for block in func.body.blocks for b in block.bindings if is_run_or_capture(b.value)]


def _launches(mod: ir.IRModule, func: relax.Function) -> int:
    """Count the launches of the PrimFuncs that a function calls itself."""
    count = 0
    for block in func.body.blocks:
        for binding in block.bindings:
            call = binding.value
            gvar = call.op if isinstance(call, relax.Call) else None
            if isinstance(gvar, ir.GlobalVar) and isinstance(mod[gvar], tirx.PrimFunc):
                count += _kernels(mod[gvar])
    return count


def _kernels(func: tirx.PrimFunc) -> int:
    """Count the kernels of a scheduled PrimFunc: launchers called, or loops bound to blocks."""
    found: list[Any] = []

    def call(node: ir.Call) -> None:
        if is_call(node, "tirx.tvm_call_cpacked"):
            found.append(node)

    def loop(node: tirx.For) -> None:
        if node.thread_binding is not None and node.thread_binding.thread_tag == "blockIdx.x":
            found.append(node)

    visit = (ir.Call, call) if KERNELS_ATTR in func.attrs else (tirx.For, loop)
    tvm_ffi.structural_walk(func.body, visit)
    return len(found)


def floor_bytes(exported: ExportedModel, batch: int, total: int) -> int:
    """Return the bytes that a token cannot but read: weights, and keys and values so far."""
    config = exported.config
    skipped = ("model.rope",) if config.tie_word_embeddings else ("model.rope", "model.embed")
    size = np.dtype(exported.dtype).itemsize
    weights = sum(math.prod(p.shape) for p in exported.params if not p.name.startswith(skipped))
    rows = 2 * config.num_layers * batch * total
    return size * (weights + rows * config.num_kv_heads * config.head_dim)


# --- running ---------------------------------------------------------------------------------


def device_weights(exported: ExportedModel, dev: tvm.runtime.Device) -> list[Any]:
    """Return random weights; large ones repeat one block: seconds instead of minutes."""
    rng = np.random.default_rng(0)
    block = (rng.standard_normal(RANDOM_ELEMENTS, "float32") * 0.02).astype(exported.dtype)
    made = []
    for param in exported.params:
        if param.recipe.compute is not None:
            value = param.recipe.compute()
        elif len(param.shape) == 1:
            value = np.ones(param.shape, param.dtype)
        else:  # begins anywhere in the block, so that no two rows or weights are alike
            value = np.resize(np.roll(block, int(rng.integers(RANDOM_ELEMENTS))), param.shape)
        made.append(tvm.runtime.tensor(value, dev))
    return made


class Ours:
    """``decode`` of a compiled model, always at the same position."""

    def __init__(self, exported: ExportedModel, graphs: bool, args: argparse.Namespace) -> None:
        target = make_target(args.target)
        pipeline = relax.get_pipeline("relax_fusion", target=target, use_cuda_graph=graphs)
        start = time.perf_counter()
        made = tvm.compile(exported.mod, target, relax_pipeline=pipeline)
        self._decode = relax.VirtualMachine(made, tvm.cuda(0))["decode"]
        self.compile_s = time.perf_counter() - start

    def bind(self, ids: Any, total: int, caches: Sequence[Any], params: Sequence[Any]) -> Callable:
        """Return the step as a function of nothing; lists are converted once, not in every call."""
        shape = tvm.runtime.ShapeTuple([total])
        arguments = ids, shape, tvm_ffi.convert(list(caches)), tvm_ffi.convert(list(params))
        return lambda: self._decode(*arguments)[0]


def time_step(step: Callable[[], Any], sync: Callable[[], None]) -> dict[str, float]:
    """Return the median seconds of a step, and those until the host may go on."""
    for _ in range(WARMUP):
        step()
    total, host = [], []
    for _ in range(REPEATS):
        sync()
        start = time.perf_counter()
        for _ in range(CALLS):
            step()
        host.append((time.perf_counter() - start) / CALLS)
        sync()
        total.append((time.perf_counter() - start) / CALLS)
    return {"token_s": statistics.median(total), "host_s": statistics.median(host)}


def error(got: Any, exact: Any) -> float:
    """Return the largest error of the logits over the largest logit."""
    return float((got.float().reshape(exact.shape) - exact).abs().max() / exact.abs().max())


def compare(args: argparse.Namespace, exported: ExportedModel) -> dict[str, Any]:
    """Time everybody on the same weights and caches, after a comparison of their logits."""
    import torch

    from benchmarks import gpu_timing
    from benchmarks.suites.decode_torch import Decoder

    ceilings = gpu_timing.ceilings(gpu_timing.Sampler())
    torch.cuda.empty_cache()
    dev, total = tvm.cuda(0), args.context + 1
    params = device_weights(exported, dev)
    rng = np.random.default_rng(1)
    caches = [
        tvm.runtime.tensor(
            rng.standard_normal(tuple(map(int, shape)), "float32").astype("float16"), dev
        )
        for shape in exported.cache_shapes
    ]
    ids = tvm.runtime.tensor(np.arange(args.batch, dtype="int32")[:, None] + 7, dev)
    sync = torch.cuda.synchronize
    twin = [torch.from_dlpack(t) for t in caches]
    shared = {
        p.name: torch.from_dlpack(t)
        for p, t in zip(exported.params, params, strict=True)
        if not p.name.startswith("model.rope")
    }
    tokens = torch.from_dlpack(ids)
    wide = {name: value.float() for name, value in shared.items()}
    with torch.no_grad():
        step = Decoder(exported.config, wide, [c.float() for c in twin], total)
        exact = step(tokens)
        del wide, step
        torch.cuda.empty_cache()
        eager = Decoder(exported.config, shared, twin, total)
        contenders: dict[str, Callable] = {"eager": lambda: eager(tokens)}
        seconds: dict[str, float] = {}
        for name, graphs in (("graphs", True), ("no graphs", False)):
            ours = Ours(exported, graphs, args)
            seconds[name] = ours.compile_s
            contenders[name] = ours.bind(ids, total, caches, params)
        if not args.no_compile:
            try:
                compiled = torch.compile(eager, mode="max-autotune", dynamic=False)
                start = time.perf_counter()
                compiled(tokens)
                sync()
                seconds["torch.compile"] = time.perf_counter() - start
                contenders["torch.compile"] = lambda: compiled(tokens)
            except Exception as err:  # a peer that cannot run is no reason to lose our own times
                print(f"torch.compile failed: {type(err).__name__}: {str(err)[:300]}", flush=True)
        errors, times = {}, {}
        for name, call in contenders.items():
            for _ in range(2):  # the second is a replay
                got = call()
                sync()
            errors[name] = error(gpu_timing.as_torch(got).clone(), exact)
        allowed = gpu_timing.allowed_error(errors["eager"], "float16")
        for name, call in contenders.items():
            times[name] = time_step(call, sync)
            print(f"{name}: {1e3 * times[name]['token_s']:.3f} ms", flush=True)
    return {
        "gpu": torch.cuda.get_device_name(),
        **ceilings,
        "times": times,
        "compile_s": seconds,
        "errors": errors,
        "allowed_error": allowed,
        "accurate": all(errors[name] <= allowed for name in ("graphs", "no graphs")),
    }


# --- results ---------------------------------------------------------------------------------


def report(record: dict[str, Any]) -> str:
    """Return a record as Markdown."""
    floor = record["floor_s"]
    rows = [("", "ms a token", "of it the host's", "of the floor's speed", "error")]
    for name, taken in record["times"].items():
        token = taken["token_s"]
        cells = (f"{1e3 * token:.3f}", f"{1e3 * taken['host_s']:.3f}", f"{floor / token:.0%}")
        rows.append((name, *cells, f"{record['errors'][name]:.1e}"))
    rows.append(("floor", f"{1e3 * floor:.3f}", "", "100%", ""))
    kernels = record["launches"]
    verdict = "" if record["accurate"] else "\n\n**The error of ours is larger than allowed.**"
    return (
        f"{record['gpu']}; {record['layers']} layers of LLaMA-3.1-8B's widths, vocabulary "
        f"{record['vocab']}, float16, batch {record['batch']}, context {record['context']}; median "
        f"of {REPEATS} x {CALLS} tokens, L2 not flushed.\n\n"
        f"{recording.markdown_table(rows)}\n\n"
        f"A layer is {kernels['layer']:g} launches, {kernels['layer_in_graphs']:g} of them in "
        f"graphs; {kernels['rest']:g} more a token. The floor is {record['floor_bytes'] / 1e9:.2f} "
        f"GB at {record['copy_tb_s']:.2f} TB/s. Errors are relative to the largest logit; ours may "
        f"be {record['allowed_error']:.1e}.{verdict}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h200", help="a device of the table (default: h200)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024, help="tokens before this one")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--results", type=Path, default=recording.RESULTS)
    args = parser.parse_args()
    if args.layers < 2:
        parser.error("--layers must be at least 2: what a layer adds is a difference")
    return args


def export_model(args: argparse.Namespace, layers: int) -> ExportedModel:
    config = replace(models.zoo_config("llama-3.1-8b"), num_layers=layers, vocab_size=args.vocab)
    length = args.context + 64
    made = models.export(config, dtype="float16", max_seq_len=length, batch=args.batch)
    return decode_only(made)


def count_launches(args: argparse.Namespace, exported: ExportedModel) -> dict[str, float]:
    """Return the launches of a layer and of the rest of a token."""
    target = make_target(args.target)
    (one, one_in), (all_, all_in) = (launches(e, target) for e in (export_model(args, 1), exported))
    layer = (all_ - one) / (args.layers - 1)
    inside = (all_in - one_in) / (args.layers - 1)
    return {"layer": layer, "layer_in_graphs": inside, "rest": all_ - layer * args.layers}


def main() -> int:
    args = parse()
    exported = export_model(args, args.layers)
    record = {
        **recording.facts(),
        **{name: getattr(args, name) for name in ("layers", "batch", "context", "vocab", "target")},
        "launches": count_launches(args, exported),
        "floor_bytes": floor_bytes(exported, args.batch, args.context + 1),
    }
    record |= compare(args, exported)
    record["floor_s"] = record["floor_bytes"] / (record["copy_tb_s"] * 1e12)
    text = report(record)
    name = f"bench_decode-batch{args.batch}"
    files = recording.write(name, record, text, args.results)
    print(text, *files, sep="\n")
    return 0 if record["accurate"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
