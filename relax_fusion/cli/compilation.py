"""What a compilation decided, as `compile` and ``explain --json`` write it and `diff` reads it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ..errors import RelaxFusionError
from ..files import read_file, write_file
from ..hardware.target import make_target
from ..report import Item, Leftover, Report, Text
from ..report.html.sources import kernel_texts
from ..validation import json_text, read_json, shown
from .console import CliError
from .manifest import MANIFEST, REPORT, Manifest, read_manifest
from .model_arguments import asked

_Record = TypeVar("_Record")


def report_record(report: Report) -> dict[str, Any]:
    """Return a report as what JSON has, its parts by their names."""
    texts = {
        "decisions": report.to_json(),
        "leftovers": report.leftovers_to_json(),
        "schedules": report.schedules_to_json(),
        "coverage": report.coverage_to_json(),
        "calls": report.calls_to_json(),
        "work": report.work_to_json(),
    }
    left_out = [asdict(each) for each in report.left_out]
    parts = {name: json.loads(text) for name, text in texts.items()}
    return {**parts, "kernels": report.kernels, "left_out": left_out}


def write_report(file: Path, facts: Mapping[str, Any], report: Report) -> None:
    """Write facts about a compilation, its report, and the texts of its kernels."""
    record = {**facts, **report_record(report), "sources": kernel_texts(report)}
    write_file(file, json_text(record) + "\n")


@dataclass(frozen=True)
class Texts:
    """The texts of a function's kernels.

    Parameters
    ----------
    function : str
        Its name.
    texts : tuple of Text
        What they are called, in which language, and what they say.
    """

    function: str
    texts: tuple[Text, ...]


@dataclass(frozen=True)
class Compilation:
    """What is known of a compilation.

    Parameters
    ----------
    path : str
        Where it was read.
    record : dict
        The report, with facts about the model in front.
    files : dict of str to int
        Bytes of the directory's files; empty where only a report was given.
    bounds : dict of str to int
        Largest values of symbolic sizes.
    """

    path: str
    record: dict[str, Any]
    files: dict[str, int] = field(default_factory=dict)
    bounds: dict[str, int] = field(default_factory=dict)

    def fact(self, name: str) -> Any:
        """Return a fact about the model; None where it is not known."""
        return self.record.get(name)

    @property
    def sources(self) -> dict[str, tuple[Text, ...]]:
        """Texts of its kernels, by function; empty where there are none, as of `explain`.

        Raises
        ------
        CliError
            If the report's are damaged.
        """
        return {each.function: each.texts for each in self._read("sources", Texts)}

    @property
    def leftovers(self) -> list[Leftover]:
        """What no kernel of ours computes.

        Raises
        ------
        CliError
            If the report's are damaged.
        """
        return self._read("leftovers", Leftover)

    def _read(self, name: str, kind: type[_Record]) -> list[_Record]:
        text = json.dumps(self.record.get(name, []))
        try:
            found: list[_Record] = read_json(
                list[kind],  # type: ignore[valid-type]  # a type at run time
                text,
                CliError,
                f"{self.path} is damaged: {name}",
            )
        except CliError as err:
            raise CliError(str(err), code=2) from err
        return found

    @cached_property
    def items(self) -> list[Item]:
        """What its functions multiply.

        Raises
        ------
        CliError
            If the report does not say it.
        """
        try:
            found = [Item.from_record(each) for each in self.record["work"]]
            for item in found:
                item.check_dims()
            return found
        except (TypeError, LookupError, AttributeError, ValueError, RelaxFusionError) as err:
            raise CliError(
                f"{self.path} does not say what the functions multiply ({shown(str(err))}); "
                "compile again",
                code=2,
            ) from err


def is_compiled(path: Path) -> bool:
    """Tell whether a path is a directory that `compile` made."""
    return (path / MANIFEST).is_file()


_MODEL = ("dtype", "quantization", "max_seq_len", "batch")
"""Arguments that say what of a model is compiled; `asked` knows those that say how."""


def check_unasked(args: argparse.Namespace, target: str, besides: Collection[str] = ()) -> None:
    """Refuse arguments that say how a model is compiled, of one that is compiled already.

    Parameters
    ----------
    args
        Those of the command; ``source`` is the directory.
    target : str
        What it was compiled for, which may be said again.
    besides : collection of str
        Arguments that say something else to this command.

    Raises
    ------
    CliError
        If there is one.
    """
    names = (*(name for name in _MODEL if getattr(args, name, None)), *asked(args))
    given = next((name for name in names if name not in besides), None)
    if str(args.target) not in (str(make_target("llvm")), target):  # llvm by default
        given = "target"
    if given is not None:
        raise CliError(
            f"--{given.replace('_', '-')} says how a model is compiled, but {args.source} is "
            "compiled already",
            code=2,
        )


def read_compilation(text: str) -> Compilation:
    """Read a compiled directory, or the report of one.

    Raises
    ------
    CliError
        If it is neither, by exit code 2; the message says what it is.
    """
    path = Path(text)
    if path.name == MANIFEST and path.is_file():
        path = path.parent
    if not path.exists():
        raise CliError(f"{text} does not exist; give {_WANTED}", code=2)
    if path.is_dir():
        return _of_directory(text, path)
    return Compilation(text, _record(path))


_WANTED = "a directory that `relax-fusion compile` made, or what `explain --json` wrote"


def _of_directory(text: str, path: Path) -> Compilation:
    if not is_compiled(path):
        if path.name.endswith(".part"):
            raise CliError(
                f"{text} is what an interrupted compile left: it has no {MANIFEST}; compile again",
                code=2,
            )
        parts = sorted(path.glob(".*.part"))
        hint = f"; an interrupted compile left {parts[0].name} in it" if parts else ""
        has = "config.json" if (path / "config.json").is_file() else ""
        hint += "; it is a model, which `compile` takes" if has else ""
        raise CliError(f"{text} has no {MANIFEST}{hint}; give {_WANTED}", code=2)
    try:
        manifest = read_manifest(path)
    except CliError as err:
        raise CliError(str(err), code=2) from err
    if REPORT not in manifest.files:
        raise CliError(f"{text} has no {REPORT}; compile again", code=2)
    record = {**_record(path / REPORT), "parameters": len(manifest.parameters)}
    sizes = {str(name): entry.bytes for name, entry in manifest.files.items() if name != REPORT}
    return Compilation(text, record, sizes, _bounds(manifest))


def _bounds(manifest: Manifest) -> dict[str, int]:
    signature = manifest.signature
    found = {n: most for n, (_, most) in signature.sizes.items() if most} if signature else {}
    if manifest.max_seq_len is not None:
        found |= dict.fromkeys(("seq_len", "total_len"), manifest.max_seq_len)
    return found


def _record(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(read_file(file))
    except OSError as err:
        raise CliError(f"{file} cannot be read: {err.strerror}", code=2) from err
    except (ValueError, RecursionError) as err:
        raise CliError(f"{file} is no JSON; give {_WANTED}", code=2) from err
    decisions = record.get("decisions") if isinstance(record, dict) else None
    if not isinstance(decisions, list) or not all(isinstance(d, dict) for d in decisions):
        raise CliError(f"{file} has no list of decisions; give {_WANTED}", code=2)
    return record
