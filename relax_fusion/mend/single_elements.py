"""Elements that TVM's attention on CPUs reads behind the end of a buffer."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import ir, tirx

from ..matching.expressions import is_number
from ..transforms.modules import mapped
from ..tvm_ir import TensorLoad, structural_equal


@tvm.transform.module_pass(opt_level=0, name="ReadSingleElements")
@dataclass(frozen=True)
class ReadSingleElements:
    """Read the one element of a dim of size 1, whatever the index says: no other is there.

    rewrite: ``scale[d] for d in 128`` -> ``scale[0]``, where scale is ``T.Buffer((1,), ...)``

    TVM's attention on CPUs over tokens of a cache, for several new ones (``_attention_prefill_cpu``
    in ``nn.llm``), reads a factor of its running softmax so, and what lies behind it in memory.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite every PrimFunc of `mod`; one without such an index stays the same."""
        return mapped(mod, (TensorLoad, _single))


def _single(load: TensorLoad) -> tirx.Expr:
    indices = [
        tirx.const(0, str(index.ty.dtype)) if is_number(size, 1) else index
        for index, size in zip(load.indices, load.source.ty.shape, strict=True)
    ]
    if all(structural_equal(*pair) for pair in zip(indices, load.indices, strict=True)):
        return load
    return tirx.BufferLoad(load.source, indices)
