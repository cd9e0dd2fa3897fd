"""``python -m benchmarks run matmul``."""

from _entry import run

run("run", "matmul")
