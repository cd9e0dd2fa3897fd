"""What was measured so far."""

from __future__ import annotations

import os
import platform
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ...timing import Times, how
from ..measure import Turn, compare, measured_parts
from .contenders import OURS, Contender
from .subject import Subject

FORMAT = 2
"""The number of the JSON's format; it rises when a reader has to change."""


@dataclass
class Results:
    """What was measured, which grows until all is done."""

    subject: Subject
    """What is measured."""
    load: float = 0.0
    """The load average of the machine before."""
    contenders: dict[str, Contender] = field(default_factory=dict)
    """Who could run, ours first."""
    failed: dict[str, str] = field(default_factory=dict)
    """Who could not, and why."""
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    """Times turn by turn; the first of several warms up, and is not counted."""
    kernels: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By step, as `measure_kernels` returns them."""
    is_interrupted: bool = False
    """Whether it was ended before it was done."""
    told: threading.Lock = field(default_factory=threading.Lock)
    shown: set[str] = field(default_factory=set)

    def drop_failed(self) -> None:
        """Leave out who could not run."""
        for who in self.failed:
            self.contenders.pop(who, None)

    def times(self, who: str, step: str) -> Times | None:
        """Return the times of a step; None where there are none."""
        turns = list(self.turns.get(who, ()))
        counted = turns[1:] or turns
        seconds = tuple(s for turn in counted for s in turn.get(step, ()))
        return Times(seconds) if seconds else None

    @property
    def steps(self) -> list[str]:
        """What is timed."""
        return list(self.subject.calls())

    def tokens_per_s(self, who: str, step: str) -> float | None:
        """Return the tokens of a step in a second, by its median; None of what has none."""
        times = self.times(who, step)
        if times is None or not self.subject.is_decoder:
            return None
        prompt = self.subject.sizes["prompt"] if step == "prefill" else 1
        return self.subject.batch * prompt / times.median

    def agreement(self, who: str) -> dict[str, Any] | None:
        """Return by how much results differ from ours; None where they have other weights.

        ``tolerance`` is what rounding can explain, None where the model's sums are not known.
        """
        peer, own = self.contenders[who], self.contenders.get(OURS)
        if who == OURS or own is None or not (peer.same_weights and peer.results and own.results):
            return None
        pairs = zip(own.results, peer.results, strict=False)
        each = [_difference(a, b) for a, b in pairs if a.shape == b.shape]
        found = {"largest_relative_difference": max(each, default=None)}
        exported = self.subject.exported
        if exported is None or not each:
            return {**found, "largest_difference": None, "tolerance": None, "agrees": None}
        worst, tolerance = compare(own.results, peer.results, exported)
        agrees = worst <= tolerance
        return {**found, "largest_difference": worst, "tolerance": tolerance, "agrees": agrees}

    @property
    def agrees(self) -> bool:
        """Whether nobody's results differ from ours by more than rounding can explain."""
        found = [self.agreement(who) for who in self.contenders]
        return all(each is None or each["agrees"] is not False for each in found)

    def to_record(self) -> dict[str, Any]:
        """Return all of it as what JSON has; times are in seconds."""
        manifest, device = self.subject.manifest, self.subject.device
        return {
            "format": FORMAT,
            "is_interrupted": self.is_interrupted,
            "versions": {"python": platform.python_version(), **_versions()},
            "machine": {**_machine(device), "load_average": self.load},
            "source": manifest.source,
            "target": manifest.target,
            "dtype": manifest.dtype,
            "quantization": manifest.quantization,
            "batch": manifest.batch,
            "max_seq_len": manifest.max_seq_len,
            "weights": manifest.weights,
            "sizes": dict(self.subject.sizes),
            "contenders": {who: self._of(who) for who in self.contenders},
            "failed": dict(self.failed),
            "kernels_are_timed": how(device),
            "kernels": self.kernels,
        }

    def _of(self, who: str) -> dict[str, Any]:
        contender, steps = self.contenders[who], {}
        for step in self.steps:
            times = self.times(who, step)
            if times is not None:
                tokens = self.tokens_per_s(who, step)
                size = self.subject.size(step)
                steps[step] = {"size": size, "tokens_per_s": tokens, **times.to_record()}
        return {
            "about": contender.about,
            "threads": contender.threads or None,
            "turns": len(self.turns.get(who, ())),
            "is_warm": len(self.turns.get(who, ())) > 1,
            "steps": steps,
            "agreement": self.agreement(who),
        }

    def news(self) -> str:
        """Return the text of what was measured that was not returned before."""
        parts = measured_parts(self.to_record())
        texts = [part if isinstance(part, str) else part.text() for part in parts]
        new = [text for text in texts if text and text not in self.shown]
        self.shown.update(new)
        return "\n\n".join(new)


def _difference(one: np.ndarray, two: np.ndarray) -> float:
    wide = one.astype("float64")
    return float(np.abs(wide - two).max() / max(np.abs(wide).max(), 1e-30)) if one.size else 0.0


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in ("relax-fusion", "apache-tvm", "triton", "numpy", "torch", "transformers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@cache
def _machine(device: Any) -> dict[str, Any]:
    """Return what the system calls the processor, and the driver the GPU and itself."""
    names = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processors = len(os.sched_getaffinity(0))
    found: dict[str, Any] = {"cpu": next(iter(names), platform.machine()), "processors": processors}
    if device.type == "cuda":
        found["gpu"] = str(device.device_name)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
            found |= zip(["driver"], done.stdout.split(), strict=False)
    return found
