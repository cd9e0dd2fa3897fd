"""``python -m benchmarks run attention``."""

from _entry import run

if __name__ == "__main__":
    run("run", "attention")
