"""Seconds a decoded token takes through the VM: CUDA graphs on and off, torch.compile, the floor.

One run on a machine with an NVIDIA GPU.  The model is a LLaMA, GPT-2 or mixture of experts with
random weights, which all contenders share, as they do the caches; with --quantization PyTorch's are
what ours decode to.  Every token is at the same position, with a full context: ours counts its
place up, and stays at the last row of its caches.  The floor is the bytes of the weights and caches
that a token reads, over the bandwidth of a copy in the same run.  Before anything is timed, the
logits of every contender are compared with float32 ones of PyTorch.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from benchmarks.recording import markdown_table
from benchmarks.report import Entry, problems
from benchmarks.suite import done
from benchmarks.suites.decode import step as steps
from benchmarks.suites.decode import timeline
from benchmarks.suites.decode.step import Step, Steps
from benchmarks.targets import floor_us
from relax_fusion import models

TORCH = ("eager", "torch.compile")


class Decode(Steps):
    """One token, at one position."""

    name, has_picture = "bench_decode", True
    key = ("model", "batch", "context", "layers", "vocab", "quantization")
    ours = ("graphs", "no graphs")
    contenders = usual = ("eager", *ours, "torch.compile")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        super().options(parser)
        usual = "tokens before this one (default 1024, or what the model has positions for)"
        parser.add_argument("--context", type=int, help=usual)
        help_ = "keep when each kernel of a replay runs, and draw it"
        parser.add_argument("--timeline", action="store_true", help=help_)

    @classmethod
    def check(cls, parser: ArgumentParser, args: Namespace) -> None:
        super().check(parser, args)
        most = models.zoo_config(args.model).max_position - 1
        args.context = min(1024, most) if args.context is None else args.context
        if not 1 <= args.context <= most:
            parser.error(f"--context must be from 1 to {most}: of {args.model}'s positions")

    def plot(self, record: Entry, path: Path) -> None:
        found = {
            f"{self.name_of(entry)}, {name}": [timeline.Kernel(*k) for k in kernels]
            for entry in done(record)
            for name, kernels in entry.get("timeline", {}).items()
        }
        if found:
            timeline.plot(found, path)

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
        torch, total = self.session.torch, item.context + 1
        exported = steps.export_model(item, item.layers, "decode", total)
        (kernels,) = steps.count_launches(item, exported, "decode", [{"total_len": total}])
        moved = steps.floor_bytes(exported, item.batch, total)
        step = Step(exported, item)
        first = np.arange(item.batch, dtype="int32")[:, None] + 7
        ids = tvm.runtime.tensor(first, step.device)
        length = tvm.runtime.tensor(np.array([item.context], "int32"), step.device)
        tokens = torch.from_dlpack(ids)

        def restart() -> None:
            """Forget what steps of ours have written: tokens, and their place."""
            ids.copyfrom(first)
            length.copyfrom(np.array([item.context], "int32"))

        def contender(name: str) -> Callable[[], Any]:
            if name in TORCH:
                return step.in_torch(tokens, total, is_compiled=name != "eager")
            decode = step.machine(graphs=name == "graphs")["decode"]
            given = ids, length, tvm.runtime.ShapeTuple([total]), *step.lists
            return lambda: decode(*given)[0]

        with torch.no_grad():
            exact = step.exact(tokens, total)
            self.session.free()
            eager = step.in_torch(tokens, total, is_compiled=False)()
            calls, found = self.compared(self.asked(item), contender, exact, restart)
            found["errors"]["eager"] = steps.error(eager, exact)
            times = {name: self.seconds(call) for name, call in calls.items()}
            shown = {
                name: timeline.timeline(calls[name], torch.cuda.synchronize)
                for name in ("graphs",) * item.timeline
                if name in calls
            }
        return {
            "timeline": shown,
            "launches": kernels,
            "floor_bytes": moved,
            "floor_s": 1e-6 * floor_us(moved, 0, self.session.ceilings["copy_tb_s"]),
            "times": {
                n: dict(zip(("token_s", "host_s"), t, strict=True)) for n, t in times.items()
            },
            **found,
            **self.judged(found["errors"], exported.dtype),
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
    for ran in entry.get("timeline", {}).values():
        verdict += f"\n\n{timeline.table([timeline.Kernel(*k) for k in ran])}"
    return (
        f"{record['gpu']}; {entry['layers']} layers of {entry['model']}'s widths, vocabulary "
        f"{entry['vocab']}, {stored}, batch {entry['batch']}, context {entry['context']}; median "
        f"of {steps.REPEATS} x {steps.CALLS} tokens, L2 not flushed.\n\n"
        f"{markdown_table(rows)}\n\n"
        f"A layer is {kernels['layer']:g} launches, {kernels['layer_in_graphs']:g} of them in "
        f"graphs; {kernels['rest']:g} more a token. The floor is {entry['floor_bytes'] / 1e9:.2f} "
        f"GB at {record['copy_tb_s']:.2f} TB/s. Errors are relative to the largest logit; ours may "
        f"be {entry['allowed_error']:.1e}.{verdict}"
    )
