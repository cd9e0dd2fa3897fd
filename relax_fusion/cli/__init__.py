"""The command ``relax-fusion``: demo, compile, tune, calibrate, run, bench, ...

Results go to stdout, progress and errors to stderr.  Exit codes: 0 done, 1 it could not be done,
2 the command line was wrong, 130 interrupted; 143 and 129 after SIGTERM and SIGHUP.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

from ..errors import RelaxFusionError
from .console import CliError, Console, tell
from .model_arguments import named
from .parser import make_parser

__all__ = ["main"]

_LONGEST_PATH, _LONGEST_ERROR = 200, 4000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code.

    `argv`: the arguments after the program's name; those of the process by default.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        with _torch_left_out(words):
            args = make_parser().parse_args(words)
    except SystemExit as stop:  # argparse: 0 after --help and --version, 2 after a usage error
        return stop.code if isinstance(stop.code, int) else 2
    console = Console(quiet=args.quiet)
    try:
        # What TVM prints, of a ROCm that it does not find, is no result.
        with console.listening(), redirect_stdout(io.StringIO()):
            with _torch_left_out(words):
                handler = named(args.handler)
            code: int = handler(args, console)
            return code
    except KeyboardInterrupt:  # where no `relax_fusion_command` watches over the process
        return _failed("interrupted", 130, show_traceback=False)
    except BrokenPipeError:
        # The reader (``| head``) has what it wanted; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except CliError as err:
        return _failed(str(err), err.code, show_traceback=args.traceback)
    except OSError as err:
        text = f"{_end(str(err.filename))}: {err.strerror}" if err.filename else str(err)
        return _failed(text, 1, show_traceback=args.traceback)
    except (RelaxFusionError, MemoryError) as err:
        return _failed(str(err) or type(err).__name__, 1, show_traceback=args.traceback)
    except Exception as err:
        # The last resort: whatever is left is a defect of ours, and is reported as one.
        text = f"unexpected {type(err).__name__}: {err}; --traceback shows where"
        return _failed(text, 1, show_traceback=args.traceback)


@contextmanager
def _torch_left_out(words: Sequence[str]) -> Iterator[None]:
    """Let TVM be imported without torch, for commands that need none.

    TVM imports torch if it can, which takes longer than most commands.  Where both are needed, it
    has to be first.
    """
    needed = {"demo", "bench"} & {*words} or any(w.lower().endswith(".pt2") for w in words)
    if needed or "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # it cannot be imported
    try:
        yield
    finally:
        del sys.modules["torch"]


def _end(path: str) -> str:
    """Return a path, or its end if it is long: that says most."""
    line = " ".join(path.split())
    return line if len(line) <= _LONGEST_PATH else f"...{line[-_LONGEST_PATH:]}"


def _failed(message: str, code: int, *, show_traceback: bool) -> int:
    if show_traceback:
        # Only on demand: imported here because nothing else needs it.
        import traceback

        tell(traceback.format_exc().rstrip())
    line = " ".join(message.split())
    if len(line) > _LONGEST_ERROR:  # of names that a file gives, without end
        line = f"{line[: _LONGEST_ERROR // 2]} ... {line[-_LONGEST_ERROR // 2 :]}"
    tell(f"relax-fusion: error: {line}")
    return code
