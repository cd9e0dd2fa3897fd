"""Measuring plans, so that the pipeline chooses by times and not by prices alone.

workloads of a module -> shortlists -> compiled, checked and timed -> tuning database
kernels of a sweep -> times -> rates of the launch model -> device file
"""

from .contests import Outcome, Tuning
from .search import tune
from .sweep import calibrate

__all__ = ["Outcome", "Tuning", "calibrate", "tune"]
