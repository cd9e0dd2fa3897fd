"""``python -m benchmarks run layer``."""

from _entry import run

run("run", "layer")
