"""Compiled kernels on disk, so that a second compilation of a model starts where the first ended.

One file per kernel, named by its key.  A file is three lines of text and two blobs::

    relax_fusion kernel 1
    <SHA-256 of everything behind this line, hexadecimal>
    <JSON: key, kernel, lengths of the blobs>
    <zlib: PTX><cubin>

Nothing in it is executed by reading it, and what another user could have written is not read.  A
file is written beside its place and moved there in one step, so a reader sees all of it or none,
however many processes write; a file that is cut short or changed fails its checksum, counts as
absent and is written again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from contextlib import suppress
from pathlib import Path

from ..errors import KernelError
from ..files import read_file, replace_file, user_cache_directory
from ..launch.kernel import CompiledKernel

_MAGIC = b"relax_fusion kernel 1"
_DAMAGE = (KernelError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
_LOG = logging.getLogger(__name__)


class KernelCache:
    """Compiled kernels by key, in a directory.

    Parameters
    ----------
    directory : Path, optional
        Made when first written to; `relax_fusion.files.user_cache_directory` by default.
    """

    def __init__(self, directory: Path | None = None):
        self.directory = directory or user_cache_directory()
        self._warned = False

    def path(self, key: str) -> Path:
        """Return the file of the kernel called `key`."""
        return self.directory / f"{key}.kernel"

    def get(self, key: str) -> CompiledKernel | None:
        """Return the kernel called `key`; None if there is none, or none that can be trusted."""
        path = self.path(key)
        try:
            data = read_file(path, own=True)
        except OSError:
            return None
        try:
            return _decode(key, data)
        except (*_DAMAGE, MemoryError, zlib.error) as err:
            _LOG.warning("%s is damaged (%s); it will be made again", path, err)
            return None

    def put(self, key: str, kernel: CompiledKernel) -> None:
        """Keep `kernel` as `key`.  A directory that cannot be written to is no error: it warns."""
        try:
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
            replace_file(self.path(key), _encode(key, kernel))
        except OSError as err:
            if not self._warned:  # once is enough for all kernels of a model
                _LOG.warning("%s cannot be written (%s); kernels are not kept", self.directory, err)
            self._warned = True

    def clear(self) -> None:
        """Remove every kernel, and what an interrupted writer left."""
        for path in [*self.directory.glob("*.kernel"), *self.directory.glob(".*.part")]:
            with suppress(OSError):  # another process may have been faster, or it is a directory
                path.unlink()


def _encode(key: str, kernel: CompiledKernel) -> bytes:
    ptx = zlib.compress(kernel.ptx)
    header = {"key": key, "kernel": kernel.to_json(), "blobs": [len(ptx), len(kernel.image)]}
    body = json.dumps(header).encode() + b"\n" + ptx + kernel.image
    return b"\n".join([_MAGIC, hashlib.sha256(body).hexdigest().encode(), body])


def _decode(key: str, data: bytes) -> CompiledKernel:
    magic, checksum, body = data.split(b"\n", 2)
    if magic != _MAGIC:
        raise ValueError("it is no kernel file of this version")
    if checksum.decode(errors="replace") != hashlib.sha256(body).hexdigest():
        raise ValueError("its checksum is wrong")
    line, blobs = body.split(b"\n", 1)
    header = json.loads(line)
    if header["key"] != key:
        raise ValueError(f"it holds the kernel {header['key']}")
    ptx_length, image_length = header["blobs"]
    if min(ptx_length, image_length) < 0 or len(blobs) != ptx_length + image_length:
        raise ValueError("its blobs have other lengths")
    ptx = zlib.decompress(blobs[:ptx_length])
    return CompiledKernel.from_json(header["kernel"], blobs[ptx_length:], ptx)
