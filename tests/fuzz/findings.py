"""What a campaign saw, and what went wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Failure:
    """A seed that went wrong, and how."""

    seed: int
    what: str

    @classmethod
    def of(cls, seed: int, err: Exception) -> Failure:
        """Return that of an error."""
        lines = str(err).strip().splitlines() or [""]
        return cls(seed, f"{type(err).__name__}: {lines[-1][:400]}")

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.what}"


@dataclass
class Findings:
    """What was seen.

    Parameters
    ----------
    count, compared : int
        How many seeds were run, and for how many everything was compared.
    seen : dict of str to Counter
        What was counted beside, by its name.
    failures : list of Failure
        What went wrong.
    """

    count: int = 0
    compared: int = 0
    seen: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Add what was seen elsewhere."""
        self.count += other.count
        self.compared += other.compared
        for name, counts in other.seen.items():
            self.seen[name].update(counts)
        self.failures += other.failures
