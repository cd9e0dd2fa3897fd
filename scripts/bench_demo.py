"""``python -m benchmarks run demo``."""

from _entry import run

run("run", "demo")
