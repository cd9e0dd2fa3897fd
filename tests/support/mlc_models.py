"""Models as MLC-LLM exports them, before any pass: text of modules, packed in one file.

``tests/data/mlc/models.tar.xz`` holds ``PRESET-QUANTISATION/FUNCTION.py``, a module with one
function of a model, and what that calls, as TVMScript.  `scripts/export_mlc.py` makes it.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import tvm
from tvm import ir, relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_fusion.matching.expressions import found_in, substitute

MODELS = Path(__file__).parents[1] / "data" / "mlc" / "models.tar.xz"
FUNCTIONS = ("embed", "batch_prefill", "batch_decode")
"""What is kept of a model: what looks tokens up, and what runs its layers."""

_NAMES = {"I": I, "R": R, "T": T, "TypeVar": TypeVar, "zeros": np.zeros}
_CONSTANT = re.compile(r'metadata\["ir\.GenericConst"\]\[\d+\]')


@cache
def texts() -> dict[str, dict[str, str]]:
    """Return the text of each function of each model by ``PRESET-QUANTISATION``."""
    found: dict[str, dict[str, str]] = {}
    with tarfile.open(MODELS) as packed:
        for member in packed.getmembers():
            name, function = member.name.removesuffix(".py").split("/")
            found.setdefault(name, {})[function] = packed.extractfile(member).read().decode()
    return found


def load(name: str, function: str) -> ir.IRModule:
    """Return a module with one function of a model."""
    return parse(texts()[name][function])


def parse(text: str) -> ir.IRModule:
    """Return the module of a text."""
    return tvm.script.from_source(text, extra_vars=_NAMES)


def pack(models: Mapping[str, Mapping[str, str]]) -> None:
    """Write texts of modules; the same texts give the same file."""
    MODELS.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(MODELS, "w:xz", preset=9) as packed:
        for name, functions in sorted(models.items()):
            for function, text in sorted(functions.items()):
                entry = tarfile.TarInfo(f"{name}/{function}.py")
                entry.size = len(text.encode())
                packed.addfile(entry, io.BytesIO(text.encode()))


def printed(mod: ir.IRModule) -> str:
    """Return the text of a module whose constants, if any, are zeros of one shape.

    Raises
    ------
    ValueError
        If there are others.
    """
    arrays = [c.value.numpy() for c in _constants(mod) if hasattr(c.value, "numpy")]
    kinds = {(a.shape, str(a.dtype), bool(a.any())) for a in arrays if a.ndim}
    if len(kinds) > 1 or any(is_not_zero for *_, is_not_zero in kinds):
        raise ValueError(f"its constants are no zeros of one shape: {kinds}")
    text = _with_sizes_of_one_dtype(mod).script(show_meta=False)
    for shape, dtype, _ in kinds:
        text = _CONSTANT.sub(f'R.const(zeros({shape}, "{dtype}"))', text)
    return text


def _constants(mod: ir.IRModule) -> list[ir.GenericConst]:
    bodies = [f.body for f in mod.functions.values() if isinstance(f, relax.Function)]
    return [const for body in bodies for const in found_in(body, ir.GenericConst)]


def _with_sizes_of_one_dtype(mod: ir.IRModule) -> ir.IRModule:
    """Return a module whose sizes of 32 bits have names that no size of 64 bits has.

    A name printed for both could not be read again.
    """
    renamed = {}
    for gvar, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            shapes = [list(p.ty.shape) for p in func.params if tirx.is_buffer_var(p)]
            narrow = {v for v in found_in(shapes, ir.Var) if str(v.ty.dtype) == "int32"}
            func = substitute(func, {v: tirx.Var(f"{v.name}_32", "int32") for v in narrow})
        renamed[gvar] = func
    return ir.IRModule(renamed, mod.attrs)


def only(mod: ir.IRModule, name: str) -> ir.IRModule:
    """Return a module with one of its functions, and what that calls."""
    kept = {mod.get_global_var(name): mod[name]}
    waiting = [mod[name]]
    while waiting:
        called = found_in(waiting.pop(), ir.GlobalVar)
        for gvar in [g for g in called if g not in kept]:
            kept[gvar] = mod[gvar]
            waiting.append(mod[gvar])
    return ir.IRModule(kept, mod.attrs)
