"""Arrays that ``run`` takes from files and writes to files, checked against a signature."""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from ..files import check_regular
from ..frontends import Signature, TensorSpec
from ..frontends.imported import shape_text
from ..validation import reason, shown
from .artifact import staged, staged_file
from .console import CliError

_DAMAGES = (
    *(ValueError, EOFError, TypeError, OverflowError, MemoryError, KeyError, RuntimeError),
    *(NotImplementedError, zipfile.BadZipFile, zlib.error),
)
"""The errors that NumPy and zipfile raise for a file that is not what its name says."""


def read_inputs(texts: Sequence[str], signature: Signature) -> list[np.ndarray]:
    """Read what ``--input`` names: an array for each input of a function, in order.

    They have the dtype of the input and a shape that it takes, in the byte order of this machine
    and contiguous.

    `texts`: each ``NAME=FILE.npy`` or ``FILE.npz``.
    Raises `CliError` if an input is missing, unknown, given twice, or cannot be taken; it names the
    input.  Raises `OSError` if a file cannot be opened.
    """
    known = {spec.name: spec for spec in signature.inputs}
    given: dict[str, np.ndarray] = {}
    for text in texts:
        for name, array in _read(text, known):
            if name not in known:
                takes = ", ".join(f"{spec.name} {spec}" for spec in signature.inputs) or "none"
                raise CliError(
                    f"--input {text}: the model has no input {shown(name)}; it takes {takes}",
                    code=2,
                )
            if name in given:
                raise CliError(f"--input {text}: the input {shown(name)} is given twice", code=2)
            given[name] = array
    missing = [f"{name} {spec}" for name, spec in known.items() if name not in given]
    if missing:
        raise CliError(f"the model also needs --input for {', '.join(missing)}", code=2)
    arrays = [_typed(given[spec.name], spec) for spec in signature.inputs]
    _check_shapes(arrays, signature)
    return arrays


def _read(text: str, known: Mapping[str, TensorSpec]) -> Iterator[tuple[str, np.ndarray]]:
    """Return names and arrays; an input's name may have a "=" in it, and so may a file's."""
    names = [name for name in known if text.startswith(f"{name}=")]
    if names:
        name = max(names, key=len)
        yield name, _loaded(Path(text[len(name) + 1 :]))
    elif text.lower().endswith(".npz") and (Path(text).exists() or "=" not in text):
        yield from _archived(Path(text))
    elif "=" in text:
        yield text.partition("=")[0], np.empty(0)  # whose name nobody knows
    else:
        raise CliError(f"--input {shown(text)} is neither NAME=FILE.npy nor FILE.npz", code=2)


def _loaded(path: Path) -> np.ndarray:
    check_regular(path)
    try:
        found = np.load(path, allow_pickle=False)
    except _DAMAGES as err:
        raise CliError(f"{path} cannot be read as an array (.npy): {reason(err)}") from err
    if not isinstance(found, np.ndarray):
        found.close()
        raise CliError(f"{path} is an archive of arrays; give it as --input {path}, without a name")
    return found


def _archived(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    check_regular(path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            if isinstance(archive, np.ndarray):
                raise ValueError("it is a single array, not an archive")
            unpacked = sum(member.file_size for member in archive.zip.infolist())
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            if unpacked > memory:
                raise ValueError(f"unpacked it has {unpacked} bytes, this machine {memory}")
            yield from archive.items()
    except _DAMAGES as err:
        raise CliError(f"{path} cannot be read as arrays (.npz): {reason(err)}") from err


def _typed(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Return an array as TVM takes it, if it has the right dtype."""
    native = array.dtype.newbyteorder("=")
    if spec.dtype == "bfloat16" and native.kind == "V" and native.itemsize == 2:
        native = np.dtype(ml_dtypes.bfloat16)  # NumPy writes it as two bytes of anything
        array = array.view(native)
    if str(native) != spec.dtype:
        raise CliError(
            f"the input {shown(spec.name)} is {native} {list(array.shape)}; must be {spec}"
        )
    return array.astype(native, order="C", copy=False)


def _check_shapes(arrays: list[np.ndarray], signature: Signature) -> None:
    """Refuse sizes that differ from those of the signature, or from one another."""
    found: dict[str, tuple[int, str]] = {}
    for array, spec in zip(arrays, signature.inputs, strict=True):
        shape = spec.shape or ()
        where = f"the input {shown(spec.name)} has shape {list(array.shape)}; must be"
        wanted = shape_text(spec.shape)
        fits = zip(array.shape, shape, strict=False)
        if array.ndim != len(shape) or any(isinstance(d, int) and n != d for n, d in fits):
            raise CliError(f"{where} {wanted}")
        for size, dim in zip(array.shape, shape, strict=True):
            if not isinstance(dim, str) or dim not in signature.sizes:
                continue  # a number, or an expression of names, which the library checks
            first, owner = found.setdefault(dim, (size, spec.name))
            if size != first:
                raise CliError(f"{where} {wanted}, and {dim} is {first} in {shown(owner)}")
            least, most = signature.sizes[dim]
            if size < least or (most is not None and size > most):
                limit = f"{least} to {most}" if most is not None else f"at least {least}"
                raise CliError(f"{where} {wanted} with {dim} {limit}")


def check_new(text: str) -> Path:
    """Return where outputs go, if nothing is there.

    Raises `CliError` if something is there that is no empty directory, or the name is one of a
    single array.
    """
    out = Path(text)
    if out.suffix.lower() == ".npy":
        raise CliError(f"--output {out}: must be a directory, or a file that ends in .npz", code=2)
    empty = out.is_dir() and not out.is_symlink() and not any(out.iterdir())
    if (out.exists() or out.is_symlink()) and not (empty and out.suffix.lower() != ".npz"):
        raise CliError(f"--output {out} exists already; choose another", code=2)
    return out


def write_outputs(out: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write outputs into a new directory, or a new ``.npz``; all of them appear, or none.

    NumPy's files have no bfloat16: such outputs are written as float32, which holds them exactly.
    """
    wide = {n: a.astype("float32") if a.dtype.kind == "V" else a for n, a in arrays.items()}
    if out.suffix.lower() == ".npz":
        with staged_file(out) as file, zipfile.ZipFile(file, "w") as archive:
            for name, array in wide.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, array, allow_pickle=False)
        return
    with staged(out, force=True) as stage:
        for name, array in wide.items():
            stem = re.sub(r"[^\w.-]", "_", name)[:200]  # a name may be a path
            while (stage / f"{stem}.npy").exists():
                stem += "_"
            np.save(stage / f"{stem}.npy", array, allow_pickle=False)
