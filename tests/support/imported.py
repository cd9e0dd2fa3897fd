"""Models as TVM's importers bring them: text of modules with their constants, packed by family.

``tests/data/models/FAMILY.tar.xz`` holds ``TAG.py``, a module as TVMScript whose constants are
parameters, and ``TAG.npz``, the constants; weights are left out and stay parameters.
`scripts/import_models.py` makes them.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax

MODELS = Path(__file__).parents[1] / "data" / "models"
LARGEST_CONSTANT = 4096
"""Elements of floating point above which a constant is a weight: only its shape is kept."""

_HEADER = """\
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
"""
_SPECIAL = {f'R.const("{n}"': f'R.const(float("{n}")' for n in ("inf", "-inf", "nan")}


def families() -> list[str]:
    """Return the names of the families that are packed."""
    return sorted(path.name.removesuffix(".tar.xz") for path in MODELS.glob("*.tar.xz"))


def load(family: str, tags: Collection[str] | None = None) -> Iterator[tuple[str, ir.IRModule]]:
    """Return the modules of a family with their names, or those among them that are asked for."""
    with tarfile.open(MODELS / f"{family}.tar.xz") as packed:
        files = {m.name: packed.extractfile(m).read() for m in packed.getmembers()}
    for name in sorted(n for n in files if n.endswith(".py")):
        tag = name.removesuffix(".py")
        if tags is not None and tag not in tags:
            continue
        with np.load(io.BytesIO(files[f"{tag}.npz"])) as arrays:
            yield tag, parse(files[name].decode(), dict(arrays))


def parse(text: str, constants: Mapping[str, np.ndarray]) -> ir.IRModule:
    """Return the module of a text, with its constants in place."""
    for printed, taken in _SPECIAL.items():
        text = text.replace(printed, taken)
    mod = tvm.script.from_source(text.removeprefix(_HEADER))
    bound = {name: tvm.runtime.tensor(array) for name, array in constants.items()}
    return relax.transform.BindParams("main", bound)(mod) if bound else mod


def pack(family: str, modules: Mapping[str, ir.IRModule]) -> None:
    """Write the modules of a family; the same modules give the same file."""
    MODELS.mkdir(parents=True, exist_ok=True)
    with tarfile.open(MODELS / f"{family}.tar.xz", "w:xz", preset=9) as packed:
        for tag, mod in sorted(modules.items()):
            text, constants = without_constants(mod)
            arrays = io.BytesIO()
            np.savez(arrays, **constants)
            for name, data in ((f"{tag}.py", text.encode()), (f"{tag}.npz", arrays.getvalue())):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                packed.addfile(entry, io.BytesIO(data))


def without_constants(mod: ir.IRModule) -> tuple[str, dict[str, np.ndarray]]:
    """Return the text of a module whose constants are parameters, and those that are no weights."""
    func, params, constants = mod["main"], {}, {}

    def lifted(const: ir.GenericConst) -> relax.Expr:
        array = const.value.numpy() if hasattr(const.value, "numpy") else None
        if array is None or array.ndim == 0:
            return const
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in params:
            is_weight = array.dtype.kind == "f" and array.size > LARGEST_CONSTANT
            name = f"{'weight' if is_weight else 'constant'}_{len(params)}"
            params[key] = relax.Var(name, const.ty)
            if not is_weight:
                constants[name] = array
        return params[key]

    body = tvm_ffi.structural_map(func.body, (ir.GenericConst, lifted))
    every = [*func.params, *params.values()]
    new = relax.Function(every, body, func.ret_ty, func.is_pure, func.attrs)
    others = {g: f for g, f in mod.functions.items() if g.name_hint != "main"}
    text = ir.IRModule({mod.get_global_var("main"): new, **others}).script(show_meta=False)
    return _HEADER + text, constants
