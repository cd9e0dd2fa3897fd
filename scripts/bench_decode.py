"""``python -m benchmarks run decode``."""

from _entry import run

run("run", "decode")
