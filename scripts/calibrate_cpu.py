"""``python -m benchmarks judge cpu``."""

from _entry import run

run("judge", "cpu")
