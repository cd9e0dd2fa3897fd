"""Compiled graphs on disk, so that another process takes them instead of compiling them.

A graph has a file of its record, ``KEY.json``, and a library for each piece that was compiled.  The
record is written last, in one step, and holds the checksums of the libraries: a process that is
killed on the way leaves nothing that is taken for a graph.  What another user could have written is
not read.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tvm

from ..errors import RelaxFusionError
from ..files import read_file, write_file
from ..hardware.target import user_cache_directory
from ..validation import read
from .messages import LOG
from .record import GraphRecord, piece_record, tuples


class LibraryCache:
    """Compiled graphs by key.

    Parameters
    ----------
    directory : Path, optional
        Made when first written to; ``torch`` in the cache of the user by default.
    """

    def __init__(self, directory: Path | None = None):
        self.directory = directory or user_cache_directory() / "torch"

    def get(self, key: str) -> tuple[GraphRecord, list[Any]] | None:
        """Return a graph's record and its libraries; None if it is not there, or damaged."""
        path = self.directory / f"{key}.json"
        try:
            found = json.loads(read_file(path, own=True))
            record = _record(found["record"], str(path))
            return record, [self._load(name, digest) for name, digest in found["libraries"]]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, RelaxFusionError, RuntimeError) as err:
            LOG.warning("%s is damaged (%s); the graph is compiled again", path, err)
            return None

    def _load(self, name: str, digest: str) -> Any:
        path = self.directory / Path(name).name
        if hashlib.sha256(read_file(path, own=True)).hexdigest() != digest:
            raise ValueError(f"{path} has another checksum")
        return tvm.runtime.load_module(str(path))

    def put(self, key: str, record: GraphRecord, executables: Sequence[Any]) -> None:
        """Keep a graph.  A directory that cannot be written to is no error: it warns."""
        try:
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
            kept = [self._keep(executable) for executable in executables]
            text = json.dumps({"record": asdict(record), "libraries": kept})
            write_file(self.directory / f"{key}.json", text)
        except (OSError, RuntimeError) as err:
            LOG.warning("compiled graphs are not kept in %s: %s", self.directory, err)

    def _keep(self, executable: Any) -> tuple[str, str]:
        handle, name = tempfile.mkstemp(suffix=".so", dir=self.directory, prefix=".part")
        os.close(handle)
        part = Path(name)
        try:
            executable.export_library(str(part))
            digest = hashlib.sha256(part.read_bytes()).hexdigest()
            part.chmod(0o600)
            os.replace(part, self.directory / f"{digest}.so")
        finally:
            part.unlink(missing_ok=True)
        return f"{digest}.so", digest


def _record(data: Any, where: str) -> GraphRecord:
    pieces = tuple(
        None if each is None else piece_record(each, RelaxFusionError, where)
        for each in data["pieces"]
    )
    return read(GraphRecord, {**tuples(data), "pieces": pieces}, RelaxFusionError, where)
