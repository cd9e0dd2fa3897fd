"""``python -m benchmarks judge attention``."""

from _entry import run

if __name__ == "__main__":
    run("judge", "attention")
