"""Where a benchmark runs: on this CPU, or on an NVIDIA GPU that may be lost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)


class DeviceLostError(Exception):
    """The GPU answers no more, as after an illegal access: what follows cannot be measured."""


def sentence(err: BaseException) -> str:
    """Return an exception in one line."""
    return f"{type(err).__name__}: {' '.join(str(err).split())[:300]}"


class Session:
    """A run on this CPU.

    Parameters
    ----------
    name : str
        What runs.
    """

    def __init__(self, name: str) -> None:
        self.facts: dict[str, Any] = {}

    def check(self, cause: Exception) -> None:
        """Tell an error of one contender from one that leaves the device unusable."""

    def free(self) -> None:
        """Give back the memory that a case took."""


class Gpu(Session):
    """A run on an NVIDIA GPU beside torch, which is imported here, for reports need none."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        import torch

        from benchmarks import gpu_timing

        if not torch.cuda.is_available():
            raise SystemExit(f"{name} needs an NVIDIA GPU")
        self.torch, self.timing = torch, gpu_timing
        self.sampler = gpu_timing.Sampler()
        self.ceilings = gpu_timing.ceilings(self.sampler)
        self.facts |= {"gpu": torch.cuda.get_device_name(), **self.ceilings}
        speeds = ", ".join(f"{k} {v:.3f}" for k, v in self.ceilings.items())
        print(f"{self.facts['gpu']}: {speeds}", flush=True)

    @property
    def speeds(self) -> dict[str, float]:
        """What an entry keeps of the device's limits."""
        return {name: self.ceilings[name] for name in ("copy_tb_s", "launch_us")}

    def check(self, cause: Exception) -> None:
        try:
            self.torch.cuda.synchronize()
        except Exception as err:
            raise DeviceLostError(f"{sentence(cause)}; then {sentence(err)}") from cause

    def free(self) -> None:
        self.torch.cuda.empty_cache()

    def captured(
        self,
        names: Iterable[Name],
        contender: Callable[[Name], Callable[[], Any]],
        check: Callable[[Name, Any], None],
    ) -> tuple[dict[Name, Any], dict[Name, str]]:
        """Return the calls of the contenders as graphs, and why others failed.

        Parameters
        ----------
        names : iterable
            The contenders, by anything that is hashed.
        contender : callable
            Makes what is to be captured, of a name.
        check : callable
            Takes a name and its call, before the call counts.
        """
        calls, failed = {}, {}
        for name in names:
            try:
                call = self.timing.Call(contender(name))
                check(name, call)
                calls[name] = call
            except Exception as err:
                self.check(err)
                failed[name] = sentence(err)
        return calls, failed

    def compared(
        self,
        names: Iterable[str],
        contender: Callable[[str], Callable[[], Any]],
        exact: Any,
        errors: dict[str, float],
        allowed: float,
    ) -> dict[str, Any]:
        """Return what an entry says of contenders: their times and errors, who is wrong or failed.

        Parameters
        ----------
        names, contender
            As for `captured`.
        exact : torch.Tensor
            What all should compute.
        errors : dict of str to float
            Those that are known already.
        allowed : float
            The largest error of one that is not wrong.
        """
        errors = dict(errors)

        def check(name: str, call: Any) -> None:
            errors[name] = self.timing.error_of(self.timing.as_torch(call.checked_result()), exact)

        calls, failed = self.captured(names, contender, check)
        return {
            "failed": failed,
            "wrong": [name for name, error in errors.items() if not error <= allowed],
            **self.times(calls),
            "errors": errors,
        }

    def times(self, calls: Mapping[str, Any]) -> dict[str, Any]:
        """Time calls in turn, L2 flushed before each."""
        samples = self.sampler.sample_ms({name: call.launch for name, call in calls.items()})
        return {
            "us": {n: 1e3 * statistics.median(s) for n, s in samples.items()},
            "tenths_us": {n: _tenths(s) for n, s in samples.items()},
            "samples": {n: len(s) for n, s in samples.items()},
            "no_graph": {n: c.why_no_graph for n, c in calls.items() if c.graph is None},
        }


SESSIONS = {"cpu": Session, "gpu": Gpu}


def _tenths(samples: list[float]) -> list[float]:
    """Return the first and the last tenth of samples, from ms to us."""
    ordered = sorted(samples)
    return [round(1e3 * ordered[int(p * (len(ordered) - 1))], 2) for p in (0.1, 0.9)]
