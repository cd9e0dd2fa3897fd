"""Calls of Relax operators as statements of a block graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tvm import relax

from ...errors import Reason
from ...workload import DTYPE_BYTES, DynamicDim
from ...workload.graph import Combine, Graph
from ...workload.values import At, Const, Expr, Op, Read, Size, apply, axes_in
from ..constants import scalar
from ..pattern import BlockView, KernelArg, KernelOut, PrimExpr, Shape, guard
from ..shapes import dtype_of, is_one, known_shape, product, same_shape, static
from .graph import Formula, Operand, Statement, as_graph, flat, moved


@dataclass(frozen=True)
class Written:
    """A region as a block graph."""

    graph: Graph
    args: tuple[KernelArg, ...]
    out: KernelOut


@dataclass
class ChainWriter:
    """The statements so far, and the formula of each variable."""

    view: BlockView
    inside: frozenset[relax.Var]
    """The bindings of the region; all other variables are operands."""
    weights: frozenset[relax.Expr]
    """The operands that matmuls multiply by from the right, for their names."""
    formulas: dict[relax.Var, Formula] = field(default_factory=dict)
    sizes: dict[str, PrimExpr | int] = field(default_factory=dict)
    operands: dict[str, Operand] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    exponentials: set[str] = field(default_factory=set)
    rounded: set[str] = field(default_factory=set)
    _read: list[tuple[relax.Expr, Shape, Formula]] = field(default_factory=list)

    def axis(self, size: PrimExpr | int) -> str:
        """Return a new axis."""
        name = f"a{len(self.sizes)}"
        self.sizes[name] = size
        return name

    def of(self, expr: relax.Expr, view: Shape | None = None) -> Formula:
        """Return an argument of a call: made in the region, a number, or an operand.

        An operand may be taken in another shape, that of a `view` of it.
        """
        if isinstance(expr, relax.Var) and expr in self.inside:
            return self.formulas[expr]
        number = scalar(self.view, expr)
        dtype = dtype_of(expr)
        shape = known_shape(expr, "an operand") if view is None else view
        if number is not None:
            guard(number == number, Reason.ATTRIBUTE, "an operand is the constant nan")
            return Formula(((),) * len(shape), Const(number), dtype)
        read = (f for e, s, f in self._read if e.same_as(expr) and same_shape(s, shape))
        return next(read, None) or self._operand(expr, dtype, shape)

    def _operand(self, expr: relax.Expr, dtype: str, shape: Shape) -> Formula:
        allowed = {*DTYPE_BYTES} - {"float64"}
        guard(dtype in allowed, Reason.DTYPE, f"an operand is {dtype}; needs {', '.join(allowed)}")
        guard(not any(same_shape((d,), (0,)) for d in shape), Reason.SHAPE, "an operand is empty")
        dims = tuple(() if is_one(d) else (self.axis(d),) for d in shape)
        letter = "w" if expr in self.weights else "x"
        name = f"{letter}{sum(n[0] == letter for n in self.operands)}"
        axes = flat(dims)
        self.operands[name] = Operand(expr, axes, dtype)
        found = Formula(dims, Read(name, tuple(At(((a, 1),)) for a in axes)), dtype)
        self._read.append((expr, shape, found))
        return found

    def aligned(self, *formulas: Formula) -> list[Formula]:
        """Return operands of an element-wise operator with the axes of the result.

        Each has all dimensions then; the axes of one that broadcasts are missing.
        """
        rank = max(len(f.dims) for f in formulas)
        wide = [replace(f, dims=((),) * (rank - len(f.dims)) + f.dims) for f in formulas]
        together: list[Formula] = [wide[0]]
        common = list(wide[0].dims)
        for other in wide[1:]:
            names: dict[str, At] = {}
            for number, dim in enumerate(other.dims):
                if not common[number]:
                    common[number] = self._unused(dim, common)
                names |= self._joined(dim, common[number]) if dim else {}
            together.append(replace(other, element=moved(other.element, names)))
        return [replace(f, dims=tuple(common)) for f in together]

    def _unused(self, dim: tuple[str, ...], common: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        """Return axes for a dimension, none of which another dimension has."""
        taken = {*flat(tuple(common))}
        return tuple(self.axis(self.sizes[n]) if n in taken else n for n in dim)

    def _joined(self, dim: tuple[str, ...], common: tuple[str, ...]) -> dict[str, At]:
        """Return what the axes of a dimension are in those of the result."""
        if len(dim) == len(common):
            for one, other in zip(dim, common, strict=True):
                self._same(one, other)
            return {n: At(((c, 1),)) for n, c in zip(dim, common, strict=True)}
        guard(len(dim) == 1, Reason.SHAPE, "rows are grouped in several ways")
        terms, stride = [], 1
        for name in reversed(common):
            terms.append((name, stride))
            stride *= static(self.sizes[name], "a size of rows that are grouped")
        return {dim[0]: At(tuple(reversed(terms)))}

    def _same(self, one: str, other: str) -> None:
        equal = same_shape((self.sizes[one],), (self.sizes[other],))
        sizes = f"{self.sizes[one]} and {self.sizes[other]}"
        guard(equal, Reason.SHAPE, f"sizes {sizes} are not known to be equal")

    def product(self, axes: Sequence[str]) -> PrimExpr | int:
        """Return how many elements some axes have."""
        return product([self.sizes[n] for n in axes])

    def count(self, axes: Sequence[str]) -> Expr:
        """Return how many elements some axes have, as a value."""
        found: Expr = Const(1.0)
        for number, name in enumerate(axes):
            size = Size(DynamicDim(name))  # `as_graph` puts the dimension in
            found = found * size if number else size
        return found

    def stored(self, formula: Formula, dtype: str = "", rounds: bool = False) -> Formula:
        """Return a formula that reads a tensor: that of a new map where it is none yet.

        Where every kernel rounds it, the tensor is of its dtype.
        """
        if not rounds and (formula.is_stored() or self._is_operand(formula)):
            return formula
        axes = formula.axes
        guard(bool(axes), Reason.SHAPE, "a tensor has one element")
        read = self._state(formula.element, axes, (), "", dtype or formula.dtype)
        if rounds:
            self.rounded.add(read.tensor)
        return replace(formula, element=read)

    def _is_operand(self, formula: Formula) -> bool:
        """Tell whether each element is one of an operand, which has no other."""
        read = formula.element
        if not isinstance(read, Read) or read.tensor not in self.operands:
            return False
        along = [name for c in read.at for name, _ in c.terms]
        return sorted(along) == sorted(formula.axes)

    def reduced(self, combine: Combine, formula: Formula, axes: Sequence[int]) -> Formula:
        """Return sums or maxima over some dimensions, which have one element then."""
        over = tuple(name for a in axes for name in formula.dims[a])
        dims = tuple(() if n in axes else d for n, d in enumerate(formula.dims))
        if not over:
            return replace(formula, dims=dims)
        read = self._state(formula.element, flat(dims), over, combine, "float32")
        return Formula(dims, read, formula.dtype)

    def contracted(self, left: Formula, right: Formula) -> Formula:
        """Return the matmul of two tensors, the batches of which broadcast."""
        right = right.renamed({n: self.axis(self.sizes[n]) for n in right.axes if n in left.axes})
        (*lead, rows, depth), (*other, inner, columns) = left.dims, right.dims
        guard(bool(depth), Reason.SHAPE, "a matmul sums over one element")
        names = self._joined(inner, depth)
        first, second = self.aligned(
            replace(left, dims=tuple(lead)), replace(right, dims=tuple(other))
        )
        batch = first.dims
        value, factors = self._factored(first.element, {*depth}, left.dtype)
        one = self._tile(Formula((*batch, rows, depth), value, left.dtype))
        weight = moved(second.element, names)
        two = self._tile(Formula((*batch, depth, columns), weight, right.dtype))
        dims = (*batch, rows, columns)
        found: Expr = self._state(one * two, flat(dims), depth, "sum", "float32")
        for name, factor in factors:
            found = apply(name, found, factor)
        return Formula(dims, found, left.dtype)

    def _tile(self, formula: Formula) -> Expr:
        """Return an element of an operand of a product, which is that of a tensor of its dtype."""
        has, read = {*axes_in(formula.element)}, formula.element
        whole = has.issuperset(flat(formula.dims[-2:]))
        guard(whole, Reason.SHAPE, "an operand of a matmul is one row or column, broadcast")
        dims = tuple(tuple(n for n in dim if n in has) for dim in formula.dims)
        formula = replace(formula, dims=dims)
        wide = isinstance(read, Read) and self._dtype_of(read.tensor) == "float32"
        if wide and formula.dtype != "float32":
            return self._state(read, formula.axes, (), "", formula.dtype)
        return self.stored(formula).element

    def _dtype_of(self, tensor: str) -> str:
        made = {s.out: s.dtype for s in self.statements}
        return made[tensor] if tensor in made else self.operands[tensor].dtype

    def _factored(
        self, value: Expr, depth: set[str], dtype: str
    ) -> tuple[Expr, list[tuple[str, Expr]]]:
        """Return an operand of a product without factors that are the same for the whole sum.

        They are multiplied by behind it: a softmax is divided by the sum of its exponentials then.
        What is left must be in the range of the dtype: an exponential, or an operand.  Exponentials
        are stored in the dtype, so that what is summed is what is multiplied.
        """
        inner, factors = value, []
        while isinstance(inner, Op) and inner.name in ("multiply", "divide"):
            first, second = inner.args
            if depth.isdisjoint(axes_in(first)) and inner.name == "multiply":
                first, second = second, first
            if not depth.isdisjoint(axes_in(second)):
                break
            factors.append((inner.name, second))
            inner = first
        if not isinstance(inner, Read) or inner.tensor not in {*self.operands, *self.exponentials}:
            return value, []
        for number, statement in enumerate(self.statements):
            if statement.out == inner.tensor:
                self.statements[number] = replace(statement, dtype=dtype)
        return inner, factors[::-1]

    def _state(
        self, value: Expr, axes: Sequence[str], reduced: Sequence[str], combine: Combine, dtype: str
    ) -> Read:
        """Add a statement; return an element of what it makes."""
        name = f"t{len(self.statements)}"
        statement = Statement(name, tuple(axes), tuple(reduced), combine, value, dtype)
        self.statements.append(statement)
        return Read(name, tuple(At(((n, 1),)) for n in axes))

    def result(self, out: relax.Var) -> Written:
        """Return the graph of what was written, of which `out` is the result."""
        found = self.formulas[out]
        self._state(found.element, found.axes, (), "", found.dtype)
        last = replace(self.statements[-1], out="out0")
        statements = [*self.statements[:-1], last]
        statements = [replace(s, rounds=s.out in self.rounded) for s in statements]
        sized = as_graph(self.operands, statements, self.sizes, self.view.bounds)
        args = tuple(KernelArg(o.expr, sized.shapes[n]) for n, o in self.operands.items())
        return Written(sized.graph, args, KernelOut(out, sized.shapes["out0"], found.dtype))
