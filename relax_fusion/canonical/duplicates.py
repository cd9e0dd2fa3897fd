"""Common subexpressions: what is computed twice of the same tensors."""

from __future__ import annotations

from tvm import ir, relax

from ..matching.effects import free_vars
from ..transforms.modules import module_pass
from .rewriter import ITEM, Rewriter, Rule, canonicalise


@module_pass
class MergeDuplicates:
    """Compute once what a dataflow block computes twice, casts and movements among it.

    rewrite::

        a = R.astype(x, "float32")
        b = R.astype(x, "float32")
        y = R.multiply(a, b)
            ->
        a = R.astype(x, "float32")
        y = R.multiply(a, a)

    TVM's `EliminateCommonSubexpr` merges what an in-place call overwrites in between, and makes
    one tensor of two results; this pass does neither.

    declines when:
        the value is a result, or no operator; something writes to it, or to what it reads; it is
        made of no tensor, as positions are, which each kernel makes for itself.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        return canonicalise(mod, DUPLICATES)


def _merged(rewriter: Rewriter, value: relax.Call | relax.TupleGetItem) -> relax.Expr | None:
    """Return the tensor that is the same; results keep memory of their own."""
    if not isinstance(rewriter.var, relax.DataflowVar) or rewriter.is_written(value):
        return None
    if not any(isinstance(v.ty, relax.TensorType | relax.TupleType) for v in free_vars(value)):
        return None
    return rewriter.bound(value)


def _repeatable() -> list[str]:
    """Return the operators whose results depend on nothing but their operands."""
    names = (n.removeprefix("relax.") for n in ir.Op.list_op_names() if n.startswith("relax."))
    plain = (n for n in names if "." not in n.removeprefix("nn.") and n != "nn.dropout")
    called = ("call_", "invoke_", "make_")
    pure = (n for n in plain if ir.Op.get(f"relax.{n}").get_attr("FPurity"))
    return [n for n in pure if not n.startswith(called)]


DUPLICATES: dict[str, Rule] = {
    **{f"relax.{name}": _merged for name in _repeatable()},
    ITEM: _merged,
}
