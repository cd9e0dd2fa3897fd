"""Measuring plans, so that the pipeline chooses by times and not by prices alone.

workloads of a module -> shortlists -> compiled, checked and timed -> tuning database
"""

from .contests import Outcome, Tuning
from .search import tune

__all__ = ["Outcome", "Tuning", "tune"]
