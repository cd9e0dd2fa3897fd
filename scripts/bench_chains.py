"""``python -m benchmarks run chains``."""

from _entry import run

run("run", "chains")
