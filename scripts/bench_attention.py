"""``python -m benchmarks run attention``."""

from _entry import run

run("run", "attention")
