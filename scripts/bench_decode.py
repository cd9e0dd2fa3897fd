"""``python -m benchmarks run decode``."""

from _entry import run

if __name__ == "__main__":
    run("run", "decode")
