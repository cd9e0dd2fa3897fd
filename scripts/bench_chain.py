"""``python -m benchmarks run chain``."""

from _entry import run

run("run", "chain")
