"""Matching: a view of a dataflow block, the guards that every pattern shares, and a match.

Patterns here are small functions over a def-use view, not TVM's pattern language: one walk finds
the longest legal chain, where `FuseOpsByPattern` needs a pattern per combination of optional steps
and cannot say why it refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import ir, relax, tirx
from tvm.sym import Analyzer

from .errors import Decline, Reason
from .workload import DTYPE_BYTES, Dim, DynamicDim, Workload

PrimExpr: TypeAlias = ir.Expr
Shape: TypeAlias = Sequence[PrimExpr | int]

_ANALYZER = Analyzer()


@dataclass(frozen=True)
class KernelArg:
    """One input of a fused kernel.

    Parameters
    ----------
    expr : relax.Expr
        The tensor (or primitive value) in the caller.
    shape : sequence of PrimExpr, optional
        The shape in which the kernel takes it; the caller reshapes where its own differs.
    """

    expr: relax.Expr
    shape: tuple[PrimExpr | int, ...] | None = None


@dataclass(frozen=True)
class KernelOut:
    """One output of a fused kernel: the variable that it replaces and the kernel's shape of it."""

    var: relax.Var
    shape: tuple[PrimExpr | int, ...]
    dtype: str


@dataclass(frozen=True)
class Match:
    """A chain that was proved to compute a workload.

    Parameters
    ----------
    pattern, spelling : str
        Which pattern matched, and in which of its spellings.
    covers : tuple of relax.Var
        The bindings that the kernel computes; they disappear.
    args : tuple of KernelArg
        Inputs, in the order of the PrimFunc's parameters.
    outs : tuple of KernelOut
        Outputs, in the order of the PrimFunc's parameters.
    workload : Workload
        What the kernel computes.
    """

    pattern: str
    spelling: str
    covers: tuple[relax.Var, ...]
    args: tuple[KernelArg, ...]
    outs: tuple[KernelOut, ...]
    workload: Workload

    @property
    def where(self) -> str:
        """The names of the variables that the kernel defines, for reports."""
        return ", ".join(out.var.name for out in self.outs)


class Refused(Exception):
    """Raised by a guard inside a matcher; the pass turns it into a recorded `Decline`."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(detail)
        self.decline = Decline(reason, detail)


def guard(condition: bool, reason: Reason, detail: str) -> None:
    """Refuse the chain at hand unless `condition` holds."""
    if not condition:
        raise Refused(reason, detail)


class BlockView:
    """Def-use chains of one dataflow block.

    Parameters
    ----------
    block : relax.DataflowBlock
        The block.
    mod : tvm.IRModule
        Its module, to look at the PrimFuncs that it calls.
    """

    def __init__(self, block: relax.DataflowBlock, mod: ir.IRModule):
        self.mod = mod
        self.bindings = list(block.bindings)
        self.index = {b.var: i for i, b in enumerate(self.bindings)}
        self.defs = {b.var: b.value for b in self.bindings}
        self.reads = {b.var: list(dict.fromkeys(free_vars(b.value))) for b in self.bindings}
        self.users: dict[relax.Var, list[relax.Var]] = {}
        for binding in self.bindings:
            for var in self.reads[binding.var]:
                self.users.setdefault(var, []).append(binding.var)
        # A plain block is only looked at: what it could fuse is declined as impure.
        outputs = self.bindings if isinstance(block, relax.DataflowBlock) else []
        self.is_output = {b.var for b in outputs if not isinstance(b.var, relax.DataflowVar)}
        self.casts = {b.var for b in self.bindings if isinstance(b, relax.MatchCast)}

    def definition(self, expr: relax.Expr) -> relax.Expr:
        """Return the value bound to `expr` in this block, following aliases that keep its type."""
        seen = expr
        while isinstance(seen, relax.Var) and seen in self.defs and seen not in self.casts:
            seen = self.defs[seen]
        return seen

    def call(self, expr: relax.Expr, *ops: str) -> relax.Call | None:
        """Return the call of one of `ops` that defines `expr`, or None."""
        value = self.definition(expr)
        return value if is_call(value, *ops) else None

    def uses(self, var: relax.Var) -> list[relax.Var]:
        """Return the bindings of this block that read `var`."""
        return self.users.get(var, [])

    def escapes(self, var: relax.Var) -> bool:
        """Tell whether `var` is read outside this block."""
        return var in self.is_output

    def only_user(self, var: relax.Var) -> relax.Var | None:
        """Return the one binding that reads `var`, or None if there is not exactly one."""
        users = self.uses(var)
        return users[0] if len(users) == 1 and not self.escapes(var) else None

    def depends_on(self, expr: relax.Expr, targets: set[relax.Var]) -> bool:
        """Tell whether `expr` is computed, within this block, from any of `targets`."""
        # What is bound before the first target cannot depend on any of them.
        first = min((self.index[t] for t in targets if t in self.index), default=len(self.index))
        stack, seen = list(free_vars(expr)), set()
        while stack:
            var = stack.pop()
            if var in targets:
                return True
            if var not in seen and self.index.get(var, -1) > first:
                seen.add(var)
                stack.extend(self.reads[var])
        return False


def free_vars(expr: relax.Expr) -> list[relax.Var]:
    """Return the Relax variables read by a bound value (a nested function's inner ones excluded)."""
    if isinstance(expr, relax.Var):
        return [expr]
    return list(relax.analysis.free_vars(expr))


def is_call(expr: relax.Expr | None, *ops: str) -> bool:
    """Tell whether `expr` is a call of one of the operators named `ops`."""
    return isinstance(expr, relax.Call) and isinstance(expr.op, ir.Op) and expr.op.name in ops


def shape_of(expr: relax.Expr) -> list[PrimExpr] | None:
    """Return the dimensions of a tensor, or None if its rank or shape is unknown."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    return list(ty.shape.values)


def dtype_of(expr: relax.Expr) -> str:
    """Return the element type of a tensor, ``""`` if it is unknown."""
    ty = expr.ty
    return str(ty.dtype) if isinstance(ty, relax.TensorType) and ty.dtype is not None else ""


def known_shape(expr: relax.Expr, what: str) -> list[PrimExpr]:
    """Return the shape of `expr`, refusing the chain if it is not known at compile time."""
    shape = shape_of(expr)
    if shape is None:
        raise Refused(Reason.SHAPE, f"{what} has no known shape: {expr.ty}")
    return shape


def static(dim: PrimExpr | int, what: str) -> int:
    """Return a dimension as an int, refusing the chain if it is dynamic or zero."""
    value = dim if isinstance(dim, int) else int(dim) if isinstance(dim, tirx.IntImm) else None
    if value is None:
        raise Refused(Reason.SHAPE, f"{what} is dynamic ({dim}); it must be static")
    guard(value > 0, Reason.SHAPE, f"{what} is {value}; it must be at least 1")
    return value


def same_shape(a: Shape | None, b: Shape | None) -> bool:
    """Tell whether two shapes are provably equal."""
    return a is not None and b is not None and len(a) == len(b) and all(map(_same_dim, a, b))


def _same_dim(a: PrimExpr | int, b: PrimExpr | int) -> bool:
    return bool(_ANALYZER.can_prove_equal(a, b))


def product(dims: Shape) -> PrimExpr | int:
    """Return the simplified product of dimensions, an int where all are static."""
    total: PrimExpr | int = tirx.IntImm("int64", 1)
    for dim in dims:
        total = total * dim
    total = _ANALYZER.simplify(total)
    return int(total) if isinstance(total, tirx.IntImm) else total


def as_dim(value: PrimExpr | int, bounds: dict[str, int] | None = None) -> Dim:
    """Describe a size for a workload: an int, or a `DynamicDim` named as it prints.

    `bounds` maps the names of symbolic variables to their largest values.
    """
    if isinstance(value, int):
        return value
    if isinstance(value, tirx.IntImm):
        return int(value)
    return DynamicDim(str(value), _upper(value, bounds or {}))


def _upper(value: PrimExpr, bounds: dict[str, int]) -> int | None:
    """Return the largest value of a size, None if a variable in it has no bound."""
    analyzer = Analyzer()
    for var in tirx.analysis.undefined_vars(value):
        if var.name not in bounds:
            return None
        analyzer.bind(var, ir.Range(0, bounds[var.name] + 1))
    return int(analyzer.const_int_bound(value).max_value)


def check_dtype(dtype: str, what: str) -> str:
    """Return `dtype`, refusing the chain if the kernels do not handle it."""
    allowed = [d for d in DTYPE_BYTES if d != "float64"]
    detail = f"{what} is {dtype or 'unknown'}; needs {', '.join(allowed)}"
    guard(dtype in allowed, Reason.DTYPE, detail)
    return dtype


def check_vdevices(exprs: Sequence[relax.Expr]) -> None:
    """Refuse operands that live on different virtual devices."""
    places = {str(e.ty.vdevice) for e in exprs if isinstance(e.ty, relax.TensorType) and e.ty.vdevice}
    guard(len(places) <= 1, Reason.VDEVICE, f"operands live on {' and '.join(sorted(places))}")


Matcher = Callable[[BlockView, relax.Var], Match | None]
"""Looks at the binding of one variable: a match, None (not an anchor of this pattern), or Refused."""
