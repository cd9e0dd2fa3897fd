"""``python -m benchmarks run compile``."""

from _entry import run

run("run", "compile")
