"""``python -m benchmarks run launch``."""

from _entry import run

run("run", "launch")
