"""``python -m benchmarks judge matmul``."""

from _entry import run

if __name__ == "__main__":
    run("judge", "matmul")
