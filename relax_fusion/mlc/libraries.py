"""Options of MLC-LLM that stand for libraries, and what becomes of them without the library."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable

import tvm


class AbsentLibraryWarning(UserWarning):
    """An option asks for a library that is not there; compilation goes on without."""


def _in_tvm(function: str) -> Callable[[], bool]:
    return lambda: tvm.get_global_func(function, True) is not None


LIBRARIES: dict[str, tuple[str, Callable[[], bool]]] = {
    "flashinfer": (
        "the package flashinfer",
        lambda: importlib.util.find_spec("flashinfer") is not None,
    ),
    "cublas_gemm": ("a TVM that was built with cuBLAS", _in_tvm("relax.ext.cublas")),
    "faster_transformer": (
        "a TVM that was built with FasterTransformer",
        _in_tvm("fastertransformer.gemm_fp16_int"),
    ),
    "cutlass": ("a TVM that was built with CUTLASS", _in_tvm("cutlass.group_gemm")),
}
"""By option: what it needs, and whether that is there."""


def available(option: str, wanted: bool) -> bool:
    """Return what an option can be; warn where it was wanted and its library is absent."""
    needs, is_there = LIBRARIES[option]
    if wanted and not is_there():
        warnings.warn(
            f"{option}=True needs {needs}; compiling without", AbsentLibraryWarning, stacklevel=3
        )
        return False
    return wanted
