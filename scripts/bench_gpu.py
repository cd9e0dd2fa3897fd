"""``python -m benchmarks run layer``."""

from _entry import run

if __name__ == "__main__":
    run("run", "layer")
