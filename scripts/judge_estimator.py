"""``python -m benchmarks judge matmul``."""

from _entry import run

run("judge", "matmul")
