"""``python -m benchmarks run attention`` as a script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.__main__ import main

raise SystemExit(main(["run", "attention", *sys.argv[1:]]))
