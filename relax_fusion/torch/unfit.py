"""Operators that TVM's importer takes, and of which it would make something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.fx import Node

_aten = torch.ops.aten

_WRONG = {
    **dict.fromkeys((_aten.median.default, _aten.median.dim), "gives NaN where one is"),
    _aten._upsample_bilinear2d_aa.default: "smooths edges",
    _aten.grid_sampler_2d.default: "has its grid in another layout",
}
"""What an operator does that the importer's translation does not."""

_STATEFUL = ("empty", "_assert", "item", "_local")
"""How the names begin of operators that read memory as it is, or end the program."""

_SORTED = (torch.float32, torch.float16, torch.float64, torch.int32, torch.int64)
"""The dtypes that TVM sorts right; bfloat16 gives wrong numbers, bytes an error in the call."""

_VIEWS = ("_to_copy", "view", "unsqueeze", "expand", "clone", "reshape", "squeeze", "alias")
_COUNTS = ("arange", "argmax", "argmin")


def unfit(node: Node) -> str:
    """Return why an operator cannot be translated; nothing if it can."""
    target = node.target
    if "val" not in node.meta:
        return f"nothing is known of the result of {target}"
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    if torch.Tag.nondeterministic_seeded in target.tags:
        return f"{target} draws numbers"
    if target in _WRONG:
        return f"{target} {_WRONG[target]}, which TVM's importer leaves out"
    name = target.__name__
    if name.startswith(_STATEFUL):
        return f"{target} depends on more than its arguments"
    if name.startswith("topk") and _dtype(node.args[0]) not in _SORTED:
        return f"TVM does not sort {_dtype(node.args[0])}"
    if name.startswith("max_pool") and not _dtype(node.args[0]).is_floating_point:
        return f"TVM's {target} takes floats only"
    if name.startswith(("cumsum", "cumprod")) and node.meta["val"].dim() == 0:
        return f"TVM's {target} takes no number"
    if name.startswith("clamp") and _dtype(node) == torch.bool:
        return f"TVM's {target} takes no booleans"
    if name.startswith("convolution") and _is_slow(node):
        return f"{target} is transposed, dilated or grouped, which is faster in PyTorch"
    if name.startswith("avg_pool") and len(node.args) > 6 and node.args[6] is not None:
        return f"{target} has a divisor of its own, which TVM's importer leaves out"
    return _from_the_end(node) if name == "select.int" else ""


def _is_slow(node: Node) -> bool:
    """Tell whether a convolution becomes loops, not a matmul of patches; depthwise ones may."""
    _, weight, _, _, _, dilation, transposed, _, groups = cast("tuple[Any, ...]", node.args)
    channels, _, *kernel = weight.meta["val"].shape
    grouped = len(kernel) > 1 and groups not in (1, channels)
    return bool(transposed or grouped or any(n != 1 for n in dilation))


def _from_the_end(node: Node) -> str:
    """Let a selected place count from the start; return why that is not possible."""
    x, axis, place = cast("tuple[Any, ...]", node.args)
    if place >= 0:
        return ""
    size = x.meta["val"].shape[axis]
    if not isinstance(size, int):
        return "an index counts from the end of a dimension of symbolic size"
    node.args = (x, axis, place % size)
    return ""


def _dtype(value: Any) -> torch.dtype:
    found: torch.dtype = value.meta["val"].dtype
    return found


def indices_of(node: Node) -> Iterator[tuple[Node, Any]]:
    """Yield the tensors that an operator looks up by, and the sizes that they index."""
    args: Any = node.args
    if node.target is _aten.index.Tensor:
        shape = args[0].meta["val"].shape
        found = [(index, shape[axis]) for axis, index in enumerate(args[1]) if index is not None]
    elif node.target is _aten.index_select.default:
        found = [(args[2], args[0].meta["val"].shape[args[1]])]
    elif node.target is _aten.take.default:
        found = [(args[1], args[0].meta["val"].numel())]
    else:
        return
    # symbolic sizes have no hash
    for index, size in {(index, str(size)): (index, size) for index, size in found}.values():
        if index.meta["val"].dtype in (torch.int64, torch.int32):
            yield index, size


def counts_from_the_start(node: Node) -> bool:
    """Tell whether an index is known to be no less than zero."""
    name = getattr(node.target, "__name__", "")
    if name.startswith(_VIEWS):
        return counts_from_the_start(cast("Node", node.args[0]))
    if name == "arange.start_step":
        start, _, step = (*node.args, 1)[:3]
        return all(isinstance(n, int) and n >= 0 for n in (start, step))
    if name in ("add.Tensor", "mul.Tensor"):
        args = cast("tuple[Any, ...]", node.args)
        return all(a >= 0 if isinstance(a, int) else counts_from_the_start(a) for a in args)
    return name.startswith(_COUNTS)
