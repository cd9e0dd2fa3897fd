"""``python -m relax_fusion.mlc``: MLC-LLM's command line, compiling with our phases."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from ..errors import RelaxFusionError
from ..validation import printable
from .installation import install
from .package import KNOWN


def main(arguments: Sequence[str]) -> int:
    """Run MLC-LLM's command line with our pipeline; return 1 if something is missing for it."""
    try:
        install()
        sys.argv = ["mlc_llm", *arguments]
        importlib.import_module("mlc_llm.__main__").main()
    except RelaxFusionError as err:
        return _failed(str(err))
    except ImportError as err:
        return _failed(f"MLC-LLM's command line cannot be imported: {err}; {_advice(err)}")
    return 0


def _advice(err: ImportError) -> str:
    """Return what helps: a package that is absent, or an MLC-LLM that fits those that are there."""
    package = (err.name or "").partition(".")[0]
    absent = isinstance(err, ModuleNotFoundError) and package and package not in sys.modules
    return f"pip install {package}" if absent else KNOWN


def _failed(why: str) -> int:
    print(printable(f"relax_fusion.mlc: error: {why}"), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
