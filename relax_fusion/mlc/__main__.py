"""``python -m relax_fusion.mlc``: MLC-LLM's command line, compiling with our phases."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from ..errors import RelaxFusionError
from .installation import install


def main(arguments: Sequence[str]) -> int:
    """Run MLC-LLM's command line with our pipeline; return 1 if MLC-LLM does not fit."""
    try:
        install()
    except RelaxFusionError as err:
        print(f"relax_fusion.mlc: error: {err}", file=sys.stderr)
        return 1
    sys.argv = ["mlc_llm", *arguments]
    importlib.import_module("mlc_llm.__main__").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
