"""A key of a graph: equal where compiled code is the same."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from ..files import read_file
from .options import TorchOptions
from .record import order_of

_PACKAGES = ("apache-tvm", "torch", "triton")
_NOT_OF_CODE = ("report", "strict", "dryrun", "check", "cache", "use_cuda_graph")
"""Options that compiled code does not depend on."""


def fingerprint(
    module: GraphModule, weights: set[int], options: TorchOptions, compiled_for: str
) -> str:
    """Return the key of a graph: 32 hexadecimal digits.

    `module`: a graph of ATen operators, whose nodes have their values as ``meta["val"]``.
    `weights`: which arguments are the same tensors in every call.
    `options`: how it is compiled.
    `compiled_for`: as `TorchOptions.compiled_for` has it.
    """
    lines = [_own_files(), *(f"{name} {version(name)}" for name in _PACKAGES)]
    chosen = {k: v for k, v in vars(options).items() if k not in (*_NOT_OF_CODE, "target")}
    if options.database is not None:  # plans of another content are other code
        lines.append(hashlib.sha256(read_file(Path(options.database))).hexdigest())
    lines += [compiled_for, repr(sorted(chosen.items())), repr(sorted(weights))]
    names = {node: f"%{n}" for n, node in enumerate(module.graph.nodes)}
    symbols: dict[str, str] = {}
    for node in module.graph.nodes:
        shown = torch.fx.map_arg((node.args, node.kwargs), lambda arg: _Name(names[arg]))
        lines.append(f"{node.op} {_target(module, node)} {shown} {_value(node, symbols)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@cache
def _own_files() -> str:
    """Return what changes when the files of this package do: their names, sizes and times."""
    root = Path(__file__).parent.parent
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".cu", ".h"))
    stats = [(str(path.relative_to(root)), path.stat()) for path in files]
    return repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


class _Name(str):
    """The number of a node, which shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _target(module: GraphModule, node: Node) -> str:
    if node.op == "placeholder":
        return ""
    if node.op == "get_attr":
        value = getattr(module, str(node.target))
        numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return hashlib.sha256(numbers.tobytes()).hexdigest()
    if isinstance(node.target, str | torch._ops.OpOverload):
        return str(node.target)
    return f"{node.target.__module__}.{node.target.__qualname__}"


def _value(node: Node, symbols: dict[str, str]) -> str:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    told = []
    for each in values:
        if isinstance(each, torch.Tensor):
            shape = [_size(size, symbols) for size in each.shape]
            told.append(f"{each.dtype} {shape} {order_of(each)} {each.device.type}")
        else:
            told.append(_size(each, symbols))
    return "; ".join(told)


def _size(size: Any, symbols: dict[str, str]) -> str:
    """Return a size by symbols that are numbered as they occur, with the bounds of new ones."""
    if not isinstance(size, torch.SymInt):
        return str(size)
    expr = size.node.expr
    new = sorted((s for s in expr.free_symbols if str(s) not in symbols), key=str)
    for symbol in new:
        bounds = size.node.shape_env.bound_sympy(symbol)
        symbols[str(symbol)] = f"s{len(symbols)}[{bounds.lower}:{bounds.upper}]"
    return str(expr.xreplace({s: sympy.Symbol(symbols[str(s)]) for s in expr.free_symbols}))
