"""``python -m benchmarks judge cpu``."""

from _entry import run

if __name__ == "__main__":
    run("judge", "cpu")
