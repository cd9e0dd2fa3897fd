"""Scripts that are benchmarks: ``python -m benchmarks VERB NAME`` by an older name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.__main__ import main


def run(verb: str, name: str) -> None:
    raise SystemExit(main([verb, name, *sys.argv[1:]]))
