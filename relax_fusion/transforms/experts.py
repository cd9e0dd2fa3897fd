"""Matmuls by experts: the weight of each row is read where it lies, not gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import tvm
from tvm import ir, relax, te, tirx
from tvm.target import Target

from ..compute.experts import OUTPUT, PRODUCT, scheduled
from ..matching.effects import Memory
from ..matching.pattern import BlockView, is_call
from ..matching.shapes import dtype_of, elsewhere, is_one, same_shape, shape_of
from .expert_values import MOVES, Column, Formula, Place, follows, sizes, source
from .modules import with_kernels

_NAME = "expert_matmul"
_FLOATS = {"float32", "float16", "bfloat16"}


@tvm.transform.module_pass(opt_level=0, name="FuseExperts")
@dataclass(frozen=True)
class FuseExperts:
    """Multiply each row by the weight of its expert, and take along what follows.

    rewrite::

        w = R.take(W, ids, axis=0)                     # [rows, n, k]: never written
        y = R.squeeze(R.matmul(w, R.expand_dims(x, -1)), -1)
        g, u = R.split(y, 2, axis=-1)
        h = R.multiply(R.nn.silu(g), u)
            ->
        h = R.call_tir(expert_matmul, (W, ids, x))

    Biases that are looked up by the same numbers, functions of elements, slices of columns, and one
    sum over the experts of a token are taken along, and a residual behind it.

    declines when:
        weights are no float matrices of known sizes; indices wrap around; a size is only known at
        run time but for rows; the product of a row is read by more than what one kernel makes.

    Parameters
    ----------
    target : Target
        What the kernels are scheduled for.
    """

    target: Target

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite every function of `mod`."""
        rewriter = _Rewrite(mod, self.target)
        return with_kernels(mod, rewriter, lambda func: scheduled(func, self.target))


@dataclass(frozen=True)
class _Product:
    """A matmul of rows by looked-up weights.

    Parameters
    ----------
    table, ids : relax.Expr
        The weights of all experts, and the expert of each row.
    rows : relax.Expr
        What is multiplied, ``[rows, k]`` but for a dimension of one.
    layout : {"nk", "kn"}
        How a weight lies.
    clips : bool
        Whether numbers of no expert are those of the nearest one.
    """

    table: relax.Expr
    ids: relax.Expr
    rows: relax.Expr
    layout: str
    clips: bool

    @property
    def depth(self) -> int:
        """What is summed over."""
        return int(sizes(self.table)[2 if self.layout == "nk" else 1])


def _product(view: BlockView, var: relax.Var) -> _Product | None:
    """Return the matmul by experts that defines `var`."""
    call = view.call(var, "relax.matmul")
    if call is None:
        return None
    for layout in ("nk", "kn"):
        weight, rows = call.args if layout == "nk" else reversed(call.args)
        take = view.call(weight, "relax.take")
        if take is None or take.attrs.axis is None or int(take.attrs.axis):
            continue
        table, ids, shape = (sizes(e) for e in (*take.args, rows))
        known = all(isinstance(d, tirx.IntImm) for d in table)
        if (len(table), len(ids), len(shape)) != (3, 1, 3) or not known:
            continue
        one = shape[2 if layout == "nk" else 1]
        dtypes = {dtype_of(rows), dtype_of(weight)}
        fits = is_one(one) and same_shape(shape[:1], ids) and dtypes <= _FLOATS
        if fits and len(dtypes) == 1 and take.attrs.mode in ("fast", "clip"):
            return _Product(take.args[0], take.args[1], rows, layout, take.attrs.mode == "clip")
    return None


@dataclass(frozen=True)
class _Chain:
    """A matmul by experts, what follows it, and the result."""

    product: _Product
    matmul: relax.Var
    covers: tuple[relax.Var, ...]
    total: relax.Var | None

    @property
    def result(self) -> relax.Var:
        """What the kernel makes."""
        return self.covers[-1]


def _chain(view: BlockView, matmul: relax.Var) -> _Chain | None:
    """Return the longest chain behind a matmul by experts whose last binding alone is read."""
    product = _product(view, matmul)
    if product is None or not view.memory.is_constant(product.table):
        return None
    covers, inside, total = [matmul], {hash(matmul)}, None
    best: _Chain | None = None
    for var in list(view.defs)[view.index[matmul] + 1 :]:
        if not any(hash(read) in inside for read in view.reads[var]):
            continue
        sums = total is None and _sums_experts(view, var)
        if not (sums or follows(view, var, inside)):
            continue
        if len(covers) == 1 and not is_call(view.defs[var], "relax.squeeze", "relax.reshape"):
            return None
        covers.append(var)
        inside.add(hash(var))
        total = var if sums else total
        moves = is_call(view.defs[var], *MOVES) and len(covers) > 2
        if _is_closed(view, covers, inside) and isinstance(var.ty, relax.TensorType) and not moves:
            best = _Chain(product, matmul, tuple(covers), total)
    return best


def _sums_experts(view: BlockView, var: relax.Var) -> bool:
    """Tell whether `var` is a sum over one dimension in front of the columns."""
    call = view.call(var, "relax.sum")
    shape = [] if call is None else sizes(call.args[0])
    if call is None or call.attrs.axis is None or call.attrs.keepdims or len(shape) != 3:
        return False
    return [int(a) % 3 for a in call.attrs.axis] == [1] and isinstance(shape[1], tirx.IntImm)


def _is_closed(view: BlockView, covers: list[relax.Var], inside: set[int]) -> bool:
    """Tell whether nothing but the last of some bindings is read elsewhere."""
    return all(
        not view.escapes(var) and all(hash(user) in inside for user in view.uses(var))
        for var in covers[:-1]
    )


_Made: TypeAlias = Callable[[relax.Var, int, int], te.Tensor]
"""Makes a tensor of an expression, for columns of a stride from a start on."""


class _Kernel:
    """The tensor expressions of a chain, over operands that are found on the way."""

    def __init__(self, view: BlockView, chain: _Chain):
        self.view, self.chain, self.product = view, chain, chain.product
        self.operands: dict[int, relax.Expr] = {}
        self.given: dict[int, te.Tensor] = {}
        self.stages: dict[tuple[object, ...], te.Tensor] = {}
        covers = [v for v in chain.covers if v not in (chain.matmul, chain.total)]
        self.formula = Formula(view, covers, self._leaf)

    def find_operands(self) -> list[relax.Expr]:
        """Return what the kernel reads, in order."""
        self.compute()
        return [*self.operands.values()]

    def compute(self, *given: te.Tensor) -> te.Tensor:
        """Return the result."""
        self.given = dict(zip(self.operands, given, strict=bool(given)))
        self.stages = {}
        shape, dtype = sizes(self.chain.result), dtype_of(self.chain.result)

        def element(*at: tirx.Var) -> tirx.Expr:
            return self.formula.at(self.chain.result, (*at[:-1], Column(at[-1]))).astype(dtype)

        return te.compute(shape, element, OUTPUT)

    def _read(self, expr: relax.Expr, at: list[tirx.Expr]) -> tirx.Expr:
        """Return an element of an operand."""
        self.operands.setdefault(hash(expr), expr)
        tensor = self.given.get(hash(expr))
        if tensor is None:
            tensor = te.placeholder(sizes(expr), dtype_of(expr))
            self.given[hash(expr)] = tensor
        return tensor(*at)

    def _leaf(self, expr: relax.Expr, place: Place) -> tirx.Expr:
        if self.chain.total is not None and expr.same_as(self.chain.total):
            return self._stage(expr, place, self._total)
        if expr.same_as(self.chain.matmul):
            row, column = place[0], next(p for p in place if isinstance(p, Column))
            return self._stage(expr, (row, column), self._dot)
        expr, place = source(self.view, expr, place)
        take = self.view.call(expr, "relax.take")
        if take is not None and self._is_bias(take):
            *rows, column = place
            return self._read(take.args[0], [self._expert(take.args[1], rows), _value(column)])
        return self._read(expr, [_value(p) for p in place])

    def _is_bias(self, take: relax.Call) -> bool:
        table, mode = shape_of(take.args[0]), "clip" if self.product.clips else "fast"
        plain = take.attrs.axis is not None and int(take.attrs.axis) == 0
        rows = table is not None and len(table) == 2 and same_shape(table[:1], self._experts())
        return plain and rows and take.attrs.mode == mode and shape_of(take.args[1]) is not None

    def _experts(self) -> list[tirx.Expr]:
        return sizes(self.product.table)[:1]

    def _expert(self, ids: relax.Expr, rows: list[tirx.Expr]) -> tirx.Expr:
        """Return the expert of a row."""
        expr, place = source(self.view, ids, tuple(rows))
        number = self._read(expr, [*place]).astype("int64")
        if not self.product.clips:
            return number
        most = int(self._experts()[0]) - 1
        low, high = tirx.IntImm("int64", 0), tirx.IntImm("int64", most)
        return tirx.max(low, tirx.min(number, high))

    def _stage(self, expr: relax.Expr, place: Place, made: _Made) -> tirx.Expr:
        """Return an element of a tensor that the kernel makes first, for columns as they lie."""
        *rows, column = place
        key = (hash(expr), column.stride, column.start)
        if key not in self.stages:
            self.stages[key] = made(expr, column.stride, column.start)
        return self.stages[key](*rows, column.axis).astype(dtype_of(expr))

    def _width(self) -> tirx.Expr:
        return sizes(self.chain.result)[-1]

    def _total(self, expr: relax.Var, stride: int, start: int) -> te.Tensor:
        call = self.view.defs[expr]
        rows, count, _ = sizes(call.args[0])

        def element(row: tirx.Var, column: tirx.Var) -> tirx.Expr:
            place = row, axis, Column(column, stride, start)
            return te.sum(self.formula.at(call.args[0], place).astype("float32"), axis)

        axis = te.reduce_axis((0, count), "e")
        return te.compute((rows, self._width()), element, "expert_sum")

    def _dot(self, _expr: relax.Var, stride: int, start: int) -> te.Tensor:
        """Return the products of rows, in float32."""
        product, depth = self.product, self.product.depth
        axis = te.reduce_axis((0, depth), "k")

        def element(row: tirx.Var, column: tirx.Var) -> tirx.Expr:
            place = (row, axis, tirx.IntImm("int64", 0))
            place = place if product.layout == "nk" else (row, place[2], axis)
            expr, at = source(self.view, product.rows, place)
            x = self._read(expr, [*at]).astype("float32")
            column = column * stride + start
            where = [column, axis] if product.layout == "nk" else [axis, column]
            w = self._read(product.table, [self._expert(product.ids, [row]), *where])
            return te.sum(x * w.astype("float32"), axis)

        name = f"{PRODUCT}{len(self.stages)}_{product.layout}"
        return te.compute((sizes(product.ids)[0], self._width()), element, name)


def _value(place: tirx.Expr | Column) -> tirx.Expr:
    return place.value if isinstance(place, Column) else place


@relax.expr_functor.mutator
class _Rewrite(relax.PyExprMutator):
    memory: Memory

    def __init__(self, mod: ir.IRModule, target: Target):
        super().__init__(mod)
        self.mod, self.target = mod, target
        self.kernels: dict[relax.Var, _Kernel] = {}
        self.made: dict[ir.GlobalVar, None] = {}

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        view = BlockView(block, self.mod, memory=self.memory)
        chains = [chain for var in view.defs if (chain := _chain(view, var)) is not None]
        made = {chain.result: _Kernel(view, chain) for chain in chains}
        self.kernels = {var: k for var, k in made.items() if self._may_read(view, k, var)}
        return super().visit_dataflow_block_(block)

    def _may_read(self, view: BlockView, kernel: _Kernel, result: relax.Var) -> bool:
        """Tell whether what a kernel reads is written by nothing, and where the kernel runs."""
        read = kernel.find_operands()
        at_home = elsewhere([*read, result], self.target) is None
        return at_home and all(map(view.memory.is_constant, read))

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        kernel = self.kernels.get(binding.var)
        if kernel is not None:
            operands = kernel.find_operands()
            call = self.builder_.call_te(kernel.compute, *operands, primfunc_name_hint=_NAME)
            self.made[call.args[0]] = None
            binding = relax.VarBinding(binding.var, call)
        super().visit_var_binding_(binding)
