"""``python -m benchmarks run compile``."""

from _entry import run

if __name__ == "__main__":
    run("run", "compile")
