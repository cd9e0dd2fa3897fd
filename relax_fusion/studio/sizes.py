"""Which symbolic sizes a function has, and which values its work is counted at."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..cli.console import CliError
from ..report import Item
from ..report.sizes import BATCHES, SizeRange, grid
from ..validation import shown

LENGTHS = ("seq_len", "total_len", "seq", "sequence", "sequence_length", "total_seq_len")
"""Names that ``--seq`` gives a value to: one for all, as in a prompt at the beginning."""

USUAL = {**dict.fromkeys(LENGTHS, 512), **dict.fromkeys(BATCHES, 1)}
OTHER = 64
"""Values of sizes that nobody gave; `USUAL` of those with a name, and this of others."""


@dataclass(frozen=True)
class Points:
    """The values at which one function is counted.

    Parameters
    ----------
    function : str
        Its name.
    ranges : dict of str to SizeRange
        Values that were given, by the names of sizes.
    values : list of dict
        Every combination, those of sizes that nobody gave among them.
    """

    function: str
    ranges: Mapping[str, SizeRange]
    values: list[dict[str, int]]


def points_of(
    items: Sequence[Item], args: argparse.Namespace, bounds: Mapping[str, int]
) -> list[Points]:
    """Return the sizes at which each function is counted.

    Parameters
    ----------
    items : sequence of Item
        Of all functions.
    args
        ``batch``, ``seq`` and ``size``.
    bounds : mapping of str to int
        Largest values of sizes.

    Raises
    ------
    CliError
        If a size that was given is none of the model, or beyond what it was made for.
    """
    functions = dict.fromkeys(item.function for item in items)
    symbols = {f: _symbols(i for i in items if i.function == f) for f in functions}
    _check_names(args, set().union(*symbols.values()), bounds)
    return [_given(f, names, args, bounds) for f, names in symbols.items()]


def _symbols(items: Iterable[Item]) -> list[str]:
    return sorted(frozenset().union(*(item.names for item in items)))


def _check_names(args: argparse.Namespace, names: set[str], bounds: Mapping[str, int]) -> None:
    known = ", ".join(sorted(names)) or "none"
    for name in dict(args.size):
        if name not in names:
            raise CliError(f"--size names {shown(name)}; the symbolic sizes are {known}", code=2)
    for option, accepted in (("batch", BATCHES), ("seq", LENGTHS)):
        if getattr(args, option) is None or names & set(accepted):
            continue
        if option == "batch" and getattr(args, "batch_is_static", False):
            continue
        raise CliError(
            f"--{option} {getattr(args, option)}: no symbolic size is called "
            f"{' or '.join(accepted)}; there are {known}, which --size takes",
            code=2,
        )
    for name in sorted(names):
        wanted, option = _wanted(name, args)
        most = bounds.get(name)
        if wanted is not None and most is not None and wanted.last > most:
            raise CliError(
                f"{option} {wanted}: {name} is at most {most}, for which the model is made",
                code=2,
            )


def _wanted(name: str, args: argparse.Namespace) -> tuple[SizeRange | None, str]:
    given = dict(args.size)
    if name in given:
        return given[name], f"--size {name}="
    if name in BATCHES:
        return args.batch, "--batch"
    return (args.seq, "--seq") if name in LENGTHS else (None, "")


def _given(
    function: str, names: Sequence[str], args: argparse.Namespace, bounds: Mapping[str, int]
) -> Points:
    """Combine ranges; the names of ``--seq`` have one value together, and so have others."""
    ranges: dict[str, SizeRange] = {}
    fixed: dict[str, int] = {}
    groups: dict[str, list[str]] = {}
    for name in names:
        wanted, option = _wanted(name, args)
        if wanted is None:
            fixed[name] = min(USUAL.get(name, OTHER), bounds.get(name, 2**31))
        else:
            ranges[name] = wanted
            groups.setdefault(option, []).append(name)
    by_option = {option: ranges[members[0]] for option, members in groups.items()}
    values = [
        fixed | {name: point[option] for option, members in groups.items() for name in members}
        for point in grid(by_option)
    ]
    return Points(function, ranges, values)
