"""`benchmarks.judge.attention` as a script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.judge.attention import main

raise SystemExit(main())
