"""``python -m benchmarks run cpu``."""

from _entry import run

if __name__ == "__main__":
    run("run", "cpu")
