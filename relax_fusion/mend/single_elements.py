"""Elements that TVM's attention on CPUs reads behind the end of a buffer."""

from __future__ import annotations

from tvm import ir, tirx

from ..matching.expressions import is_number
from ..transforms.modules import mapped, module_pass
from ..tvm_ir import TensorLoad, structural_equal


@module_pass
class ReadSingleElements:
    """Read the one element of a dim of size 1, whatever the index says: no other is there.

    rewrite: ``scale[d] for d in 128`` -> ``scale[0]``, where scale is ``T.Buffer((1,), ...)``

    TVM's attention on CPUs over tokens of a cache, for several new ones (``_attention_prefill_cpu``
    in ``nn.llm``), reads a factor of its running softmax so, and what lies behind it in memory.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
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
