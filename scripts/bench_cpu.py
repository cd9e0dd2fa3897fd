"""``python -m benchmarks run cpu``."""

from _entry import run

run("run", "cpu")
