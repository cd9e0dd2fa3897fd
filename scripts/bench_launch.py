"""``python -m benchmarks run launch``."""

from _entry import run

if __name__ == "__main__":
    run("run", "launch")
