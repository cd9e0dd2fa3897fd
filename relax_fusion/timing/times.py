"""Repeated times of one thing, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Times:
    """Seconds of one thing that was done several times.

    Parameters
    ----------
    seconds : tuple of float
        In the order in which they were measured; at least one.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Half of them are not longer."""
        return self.percentile(50)

    def percentile(self, percent: float) -> float:
        """Return the time that so many percent of them do not exceed."""
        return float(np.percentile(self.seconds, percent))

    def to_record(self) -> dict[str, Any]:
        """Return what JSON holds of it."""
        return {
            "count": len(self.seconds),
            "min_s": min(self.seconds),
            **{f"p{percent}_s": self.percentile(percent) for percent in PERCENTILES},
            "seconds": list(self.seconds),
        }
