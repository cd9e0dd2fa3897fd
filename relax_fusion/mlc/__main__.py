"""``python -m relax_fusion.mlc``: MLC-LLM's command line, compiling with our phases.

Exit codes: 0 done, 1 it could not be done, 2 the command line was wrong, 130 interrupted.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from ..errors import RelaxFusionError
from ..transforms.running import running
from ..validation import printable
from . import command_line
from .package import KNOWN
from .phases import install

TRACEBACK = "--traceback"
"""Our argument, anywhere: errors come with the place in the code."""


def main(arguments: Sequence[str]) -> int:
    """Run MLC-LLM's command line with our pipeline; whatever fails is told in one line."""
    where = TRACEBACK in arguments
    try:
        install()
        command_line.run([argument for argument in arguments if argument != TRACEBACK])
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except RelaxFusionError as err:
        return _failed(str(err), where=where)
    except ImportError as err:
        return _failed(f"MLC-LLM lacks what it imports: {err}; {_advice(err)}", where=where)
    except Exception as err:  # whatever TVM and MLC-LLM raise, which have no class in common
        name, _ = running()
        during = f"the pass {name} failed: " if name else ""
        return _failed(f"{during}{_told(err)}; {TRACEBACK} shows where", where=where)
    return 0


def _told(err: Exception) -> str:
    """Return the first sentence of an error, and the line that it is about, if it names one."""
    kind, lines = type(err).__name__, [line for line in str(err).splitlines() if line.strip()]
    if not lines:  # a bare assertion
        last = traceback.extract_tb(err.__traceback__)[-1]
        return f"{kind}: {last.line} ({Path(last.filename).name}:{last.lineno})"
    place = re.search(r"--> .*?([^/\s]+\.py:\d+)", str(err))  # in TVMScript
    return f"{kind}: {lines[0].removeprefix('error: ')}" + (f" ({place[1]})" if place else "")


def _advice(err: ImportError) -> str:
    """Return what helps: a package that is absent, or an MLC-LLM that fits those that are there."""
    package = (err.name or "").partition(".")[0]
    absent = isinstance(err, ModuleNotFoundError) and package and package not in sys.modules
    return f"pip install {package}" if absent else KNOWN


def _failed(why: str, code: int = 1, *, where: bool = False) -> int:
    if where:
        print(printable(traceback.format_exc()), file=sys.stderr, end="")
    print(printable(f"relax_fusion.mlc: error: {' '.join(why.split())}"), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
