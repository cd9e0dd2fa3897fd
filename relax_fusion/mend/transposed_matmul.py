"""Matmuls that read their right factor as it is stored, where TVM's pass for them fails."""

from __future__ import annotations

from tvm import ir, relax

from ..matching.pattern import BlockView, is_call
from ..matching.shapes import shape_of
from ..transforms.fuse_dequantize import Fuser
from ..transforms.modules import module_pass


@module_pass
class FuseTransposeMatmul:
    """Make one PrimFunc of a matmul and the transpose of its right factor.

    rewrite: ``t = R.permute_dims(w); y = R.matmul(x, t)`` -> ``y = R.call_tir(NT_matmul, (x, w))``

    TVM's pass of that name raises an AttributeError where anything else reads the transpose, an
    InternalError where a second matmul does, and an IndexError of ``matmul(x, permute_dims(x))``.

    declines when:
        the transpose moves other axes than the last two, or is made outside of the dataflow block;
        ``w`` is overwritten in place in front of the matmul; a shape is not known, or computed by
        a call; tensors live on different virtual devices.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every function; transposes that are left without a reader are dropped."""
        return Fuser(mod, _transpose, "NT_matmul").module()


def _transpose(view: BlockView, binding: relax.Binding) -> tuple[relax.Var, ...]:
    """Return the transpose of the last two axes, and no others, that a matmul reads on its right.

    Nothing where its operand or itself is overwritten before the matmul reads it.
    """
    var, call = binding.var, binding.value
    right = call.args[1] if is_call(call, "relax.matmul") and shape_of(var) is not None else None
    made = None if right in view.casts else view.defs.get(right)
    if not is_call(made, "relax.permute_dims") or (shape := shape_of(made.args[0])) is None:
        return ()
    axes, rank = made.attrs.axes, len(shape)
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    if rank < 2 or list(axes or range(rank)[::-1]) != swapped:
        return ()
    changed = any(view.memory.changes(e, right, var) for e in (made.args[0], right))
    return () if changed else (right,)
