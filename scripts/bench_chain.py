"""``python -m benchmarks run chain``."""

from _entry import run

if __name__ == "__main__":
    run("run", "chain")
