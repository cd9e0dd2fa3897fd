"""``python -m benchmarks run matmul``."""

from _entry import run

if __name__ == "__main__":
    run("run", "matmul")
