"""``python -m relax_fusion.mlc``: MLC-LLM's command line, compiling with our phases."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from ..errors import RelaxFusionError
from .installation import install


def main(arguments: Sequence[str]) -> int:
    """Run MLC-LLM's command line with our pipeline; return 1 if something is missing for it."""
    try:
        install()
        sys.argv = ["mlc_llm", *arguments]
        importlib.import_module("mlc_llm.__main__").main()
    except RelaxFusionError as err:
        return _failed(str(err))
    except ModuleNotFoundError as err:
        needs = f"MLC-LLM's command line needs the package {err.name}"
        return _failed(f"{needs}: pip install {err.name}")
    return 0


def _failed(why: str) -> int:
    print(f"relax_fusion.mlc: error: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
