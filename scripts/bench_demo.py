"""``python -m benchmarks run demo``."""

from _entry import run

if __name__ == "__main__":
    run("run", "demo")
