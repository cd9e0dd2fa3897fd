"""Tests run in this process, on a package of which one module is changed.

A mutant is tested in a fork of a process that has imported what takes long, TVM above all, but
neither the package nor its tests.  Only tests that run the changed line are asked.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SLOWER = 10
"""A test is stuck if it takes that many times what it took without a mutant, and `SECONDS`."""
SECONDS = 20
MEMORY = 6 * 2**30


@dataclass(frozen=True)
class Known:
    """What is known of a test: how long it takes, which lines it runs, and whether it shares.

    Parameters
    ----------
    node : str
        Its name.
    seconds : float
        Of the processor.
    lines : dict of str to set of int
        The lines that it runs, by file.
    shares : bool
        Whether what it needs is made for several tests of its file.
    """

    node: str
    seconds: float
    lines: dict[str, set[int]]
    shares: bool


@dataclass(frozen=True)
class Failure:
    """The first test that failed, and the class of what it raised."""

    node: str
    error: str
    message: str


class Mutated(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one file from a source of its own."""

    def __init__(self, path: Path, source: str) -> None:
        self.file, self.source = str(path), source

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin == self.file:
            self.name, self.path = name, self.file
            spec.loader = self
            return spec
        return None

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source; nothing is read from or written to caches."""
        return compile(self.source, self.file, "exec", dont_inherit=True)


@dataclass
class _Limits:
    """A pytest plugin that orders tests, gives each its time, and keeps the first failure."""

    limits: Mapping[str, float] | None = None
    failure: Failure | None = None
    count: int = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.limits is not None:
            order = {node: i for i, node in enumerate(self.limits)}
            items[:] = sorted(
                (i for i in items if i.nodeid in order), key=lambda i: order[i.nodeid]
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.count += 1
        if self.limits is not None:
            limit = SECONDS + SLOWER * self.limits[item.nodeid]
            resource.setrlimit(
                resource.RLIMIT_CPU, (int(time.process_time() + limit), resource.RLIM_INFINITY)
            )

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        if self.failure is None:
            error = call.excinfo.value
            line = " ".join(str(error).split())[:200]
            self.failure = Failure(node.nodeid, type(error).__name__, line)


def run(files: Iterable[str], tests: Mapping[str, float]) -> Failure | None:
    """Run tests in the order given, with the seconds that each usually takes; stop at a failure."""
    plugin = _Limits(tests)
    code = _pytest(files, [plugin], "-x")
    if plugin.failure is None and code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return Failure("", "ExitCode", str(code))  # such as a test that cannot be collected
    if plugin.failure is None and plugin.count < len(tests):
        return Failure("", "Missing", f"{len(tests) - plugin.count} tests are gone")
    return plugin.failure


QUICK = ("cacheprovider", "xdist", "unraisableexception", "threadexception")
"""Plugins that a mutant does without, beside those of installed packages: each fork pays them."""


def _pytest(files: Iterable[str], plugins: list[object], *arguments: str) -> int:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    without = [part for name in QUICK for part in ("-p", f"no:{name}")]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        return pytest.main(
            [*files, "-q", "--tb=no", f"--rootdir={ROOT}", *without, *arguments], plugins=plugins
        )


def tested(path: str, source: str, stages: Sequence[Mapping[str, float]]) -> Failure | None:
    """Run tests on a mutant, in stages; for a process that ends with it.

    Parameters
    ----------
    path, source : str
        The changed module: its file, and what stands there.
    stages : sequence of mapping
        Names of tests and the seconds that they take, in the order in which they are to run.
    """
    os.chdir(ROOT)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.RLIM_INFINITY))
    sys.meta_path.insert(0, Mutated(ROOT / path, source))
    for stage in stages:
        files = dict.fromkeys(node.partition("::")[0] for node in stage)
        found = run(files, stage) if stage else None
        if found is not None:
            return found
    return None


@dataclass
class _Baseline:
    """A pytest plugin that notes what each test runs of some files, and how long it takes."""

    watched: set[str]
    compiling: bool
    known: list[Known] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    lines: dict[str, set[int]] = field(default_factory=dict)
    began: float = 0.0

    def trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        """Follow calls of the watched files only."""
        seen = self.lines.get(frame.f_code.co_filename)
        if seen is None:
            return None
        add = seen.add

        def local(frame: FrameType, event: str, _arg: object) -> Any:
            add(frame.f_lineno)
            return local

        return local

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self.compiling or not _shares(item)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.lines = {name: set() for name in self.watched}
        self.began = time.process_time()
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            seconds = time.process_time() - self.began
            ran = {name: lines for name, lines in self.lines.items() if lines}
            self.known.append(Known(item.nodeid, seconds, ran, _shares(item)))

    def pytest_exception_interact(self, node: Any) -> None:
        self.failed.add(node.nodeid)


def _shares(item: pytest.Item) -> bool:
    """Tell whether a test needs what is made for its whole file, such as a compiled module."""
    made = item._fixtureinfo.name2fixturedefs.values()
    return any(d.scope in ("module", "class") for defs in made for d in defs)


def baseline(
    tests: Iterable[str], watched: set[str], only: str, compiling: bool
) -> tuple[list[Known], list[str]]:
    """Run tests on the package as it is; return what is known of each, and those that fail.

    Parameters
    ----------
    tests : iterable of str
        Files or folders.
    watched : set of str
        Files whose lines are noted.
    only : str
        Which tests, as for pytest's ``-k``.
    compiling : bool
        Whether to run also tests that share a compiled module, most of the time.
    """
    os.chdir(ROOT)
    plugin = _Baseline(watched, compiling)
    _pytest(tests, [plugin], "-k", only)
    good = [k for k in plugin.known if k.node not in plugin.failed]
    return good, sorted(plugin.failed)
