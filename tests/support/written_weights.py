"""Which weights a module writes to memory before it reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import tvm
from tvm import ir, relax, tirx

from relax_fusion.matching.pattern import is_call

SIZE = 1024
"""What a symbolic size is taken for."""


def written_weights(mod: ir.IRModule) -> list[str]:
    """Return the kernels that make something larger, of another dtype, of a function's weights.

    Weights are the parameters behind ``num_input``, and what is made of nothing else.
    """
    found = set()
    for _, func in mod.functions_items():
        if isinstance(func, relax.Function) and "num_input" in (func.attrs or {}):
            found.update(_written(func))
    return sorted(found)


def _written(func: relax.Function) -> Iterator[str]:
    weights = set(func.params[int(func.attrs["num_input"]) :])
    for binding in (b for block in func.body.blocks for b in block.bindings):
        value = binding.value
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in weights:
            weights.add(binding.var)
        if not is_call(value, "relax.call_tir"):
            continue
        read = [a for a in value.args[1].fields if isinstance(a.ty, relax.TensorType)]
        if read and all(a in weights or isinstance(a, ir.GenericConst) for a in read):
            weights.add(binding.var)
            other = max(read, key=_bytes).ty.dtype != binding.var.ty.dtype
            if other and sum(map(_bytes, read)) < _bytes(binding.var):
                yield value.args[0].name_hint


def _bytes(tensor: relax.Expr) -> int:
    sizes = (int(d) if isinstance(d, tirx.IntImm) else SIZE for d in tensor.ty.shape.values)
    return math.prod(sizes) * tvm.DataType(str(tensor.ty.dtype)).bits // 8
