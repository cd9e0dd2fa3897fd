"""``python -m relax_fusion.mlc``: MLC-LLM's command line, compiling with our phases.

Devices have our names, errors come with their reasons, and no native library is needed.

Exit codes: 0 done, 1 it could not be done, 2 the command line was wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import MissingPackageError, RelaxFusionError, TargetError
from ..hardware import DEVICES
from ..hardware.target import make_target
from ..transforms.running import running
from ..validation import printable
from . import tokenizer
from .package import KNOWN, has_native_library
from .phases import install

TRACEBACK = "--traceback"
"""This argument of ours, anywhere on the line, has errors told with the place in the code."""


def main(arguments: Sequence[str]) -> int:
    """Run MLC-LLM's command line with our pipeline; whatever fails is told in one line."""
    where = TRACEBACK in arguments
    try:
        install()
        run([argument for argument in arguments if argument != TRACEBACK])
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


NEED_LIBRARY = ("chat", "serve", "package", "calibrate", "router")
"""The subcommands that MLC-LLM's native library runs, or that start MLC-LLM anew."""

NAMES = ("llvm", *sorted(name for name, spec in DEVICES.items() if spec.kind == "gpu"))
"""``--device`` takes these names beside MLC-LLM's: this machine's processor, and GPUs."""


def run(arguments: Sequence[str]) -> None:
    """Run MLC-LLM's command line in this process.

    Raises `MissingPackageError` if a subcommand needs the native library, which is not there.
    Raises `TargetError` if ``--device`` is neither in this machine nor a name or target that is
    known.
    """
    if not has_native_library():
        if arguments and arguments[0] in NEED_LIBRARY:
            raise MissingPackageError(
                f"{arguments[0]} needs MLC-LLM's native library, which is not built; "
                "compile, convert_weight and gen_config run without"
            )
        sys.modules["mlc_llm.tokenizers"] = tokenizer
    _name_devices()
    _tell_reasons()
    sys.argv = ["mlc_llm", *arguments]
    importlib.import_module("mlc_llm.__main__").main()


def _name_devices() -> None:
    """Let MLC-LLM compile for devices that are not here, and find those that are.

    It asks for them in a process that imports all of it, which the native library would have to
    be there for.
    """
    devices: Any = importlib.import_module("mlc_llm.support.auto_device")
    targets: Any = importlib.import_module("mlc_llm.support.auto_target")
    devices._device_exists = lambda device: bool(device.exist)
    detect = targets.detect_target_and_host

    def detect_by_name(hint: str, *others: Any, **more: Any) -> Any:
        try:
            return detect(_as_json(hint) if hint.lower() in NAMES else hint, *others, **more)
        except (ValueError, RuntimeError) as err:
            raise TargetError(
                f"--device {hint}: {err}; to compile for a device that is not here, give "
                f"{', '.join(NAMES)}, or a target of TVM as JSON"
            ) from err

    targets.detect_target_and_host = detect_by_name


def _as_json(name: str) -> str:
    """Return a target as MLC-LLM reads it; it finds the host itself."""
    fields = make_target(name.lower()).export()
    return json.dumps({key: fields[key] for key in fields if key != "host"}, default=list)


def _tell_reasons() -> None:
    """Let MLC-LLM's parser say why it refuses a value, and not only that it does."""
    parser = importlib.import_module("mlc_llm.support.argparse").ArgumentParser

    def add_argument(self: argparse.ArgumentParser, *names: str, **options: Any) -> Any:
        if "type" in options:
            options["type"] = _telling(options["type"])
        return argparse.ArgumentParser.add_argument(self, *names, **options)

    parser.add_argument = add_argument


def _telling(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert_or_tell(text: str) -> Any:
        try:
            return convert(text)
        except (ValueError, RuntimeError) as err:
            raise argparse.ArgumentTypeError(str(err)) from err

    return convert_or_tell


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
