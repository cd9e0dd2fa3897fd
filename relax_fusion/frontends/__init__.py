"""Models from files: ONNX, and programs of ``torch.export``.

The packages onnx and torch are optional, and imported only where a file needs them::

    model = read_model(Path("model.onnx"))
    compiled = tvm.compile(model.mod, target, relax_pipeline=pipeline)
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import MissingPackageError, ModelFileError
from ..files import check_regular

if TYPE_CHECKING:
    from .imported import ImportedModel, Signature, TensorSpec

__all__ = ["SUFFIXES", "ImportedModel", "Signature", "TensorSpec", "read_model"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import what describes a model, and with it TVM, when it is first asked for."""
        if name not in ("ImportedModel", "Signature", "TensorSpec"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import imported

        return getattr(imported, name)


SUFFIXES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {".onnx": ("onnx", "read_onnx"), ".pt2": ("torch", "read_exported")}
)
"""The package that reads a file and the reader's name, by the file's suffix in lower case.  The
package has the name of the extra that installs it, and of the module that has the reader."""


def read_model(path: Path) -> ImportedModel:
    """Import the model of a file.

    Parameters
    ----------
    path : Path
        An ONNX file (``.onnx``) or one that ``torch.export.save`` wrote (``.pt2``).

    Returns
    -------
    ImportedModel
        The module, what it takes and returns, and its weights.

    Raises
    ------
    MissingPackageError
        If the package onnx or torch is needed and not installed.
    ModelFileError, OSError
        If the file cannot be read, or holds what TVM's importer does not take.
    """
    if path.suffix.lower() not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise ModelFileError(f"{path} has the suffix {path.suffix!r}; known ones: {known}")
    if check_regular(path).st_size == 0:
        raise ModelFileError(f"{path} is empty; export the model again")
    package, reader = SUFFIXES[path.suffix.lower()]
    try:
        import_module(package)  # optional
        read = getattr(import_module(f".{package}", __name__), reader)
    except ImportError as err:
        raise MissingPackageError(
            f"{path} needs the package {package} ({err}); pip install 'relax-fusion[{package}]'"
        ) from err
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # importers tell what they rename, and what they deprecate
        model: ImportedModel = read(path)
    return model
