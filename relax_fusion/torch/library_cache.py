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

import torch
from torch.fx import GraphModule

from ..errors import RelaxFusionError
from ..files import read_file, replace_file, user_cache_directory
from ..validation import read_json, reason
from .messages import LOG
from .program import load_library
from .record import GraphRecord
from .split import check_cut

VERSION = 2
"""The version of the records."""


class LibraryCache:
    """Compiled graphs by key.

    `device`: where their code runs.
    """

    def __init__(self, device: torch.device):
        self.directory = user_cache_directory() / "torch"  # made when first written to
        self._device = device

    def get(self, key: str, module: GraphModule) -> tuple[GraphRecord, list[Any]] | None:
        """Return a graph's record and its libraries.

        None if they are not there, damaged, of another version or of another graph than `module`:
        the graph is compiled then, and its record replaced.
        """
        path = self.directory / f"{key}.json"
        try:
            found = json.loads(read_file(path, own=True))
            if found["version"] != VERSION or found["checksum"] != _checksum(found):
                raise ValueError("it has another version or checksum")
            text = json.dumps(found["record"])
            record = read_json(GraphRecord, text, RelaxFusionError, str(path))
            counts = {len(record.operators), len(record.pieces), len(record.verdicts)}
            if counts != {len(found["libraries"])}:
                raise ValueError("its parts have other numbers of pieces")
            check_cut(module, record.operators)
            return record, [self._load(digest) for digest in found["libraries"]]
        except FileNotFoundError:
            return None
        except Exception as err:  # whatever is wrong with a file, its graph can be compiled
            LOG.warning("%s is damaged (%s); the graph is compiled again", path, reason(err))
            return None

    def _load(self, digest: str) -> Any:
        path = self.directory / f"{digest}.so"
        if hashlib.sha256(read_file(path, own=True)).hexdigest() != digest:
            raise ValueError(f"{path} has another checksum")
        return load_library(path, self._device)

    def put(self, key: str, record: GraphRecord, executables: Sequence[Any]) -> list[Any]:
        """Keep a graph, and return its libraries: LLVM has written their code once then, not twice.

        A directory that cannot be written to is no error: it warns, and nothing is returned.
        """
        try:
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
            kept = [self._keep(executable) for executable in executables]
            told = {"version": VERSION, "record": asdict(record), "libraries": kept}
            text = json.dumps({**told, "checksum": _checksum(told)})
            replace_file(self.directory / f"{key}.json", text.encode())
            return [self._load(digest) for digest in kept]
        except (OSError, RuntimeError, ValueError) as err:
            LOG.warning("compiled graphs are not kept in %s: %s", self.directory, err)
            return []

    def _keep(self, executable: Any) -> str:
        from tvm.support.cc import get_cc

        if get_cc() is None:
            raise RuntimeError("no C++ compiler (g++ or clang++) was found, which links them")
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
        return digest


def _checksum(told: dict[str, Any]) -> str:
    """Return the checksum of what a file holds beside it."""
    parts = {name: value for name, value in told.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
