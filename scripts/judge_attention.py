"""``python -m benchmarks judge attention``."""

from _entry import run

run("judge", "attention")
