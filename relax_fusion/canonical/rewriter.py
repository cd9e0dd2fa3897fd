"""The frame of the canonicalising passes: rules that look at a call and at what it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from tvm import ir, relax, tirx

from ..matching.bindings import Identity, items_of
from ..matching.effects import Memory, free_vars, reads_of
from ..matching.expressions import substitute
from ..matching.known_effects import memory_of
from ..matching.pattern import belongs_to_a_library, is_call, operator_of
from ..matching.shapes import dtype_of, same_shape, shape_of
from ..transforms.modules import functions_of
from ..tvm_ir import Analyzer, structural_equal

Rule: TypeAlias = Callable[["Rewriter", relax.Call | relax.TupleGetItem], relax.Expr | None]
"""Takes a value whose operands are canonical; returns another that is the same, None to keep it."""

LOWER, UPPER = "tir_var_lower_bound", "tir_var_upper_bound"
"""Attributes of functions, as TVM's front ends and passes know them."""

LARGEST = 2**48
"""No dimension of a tensor has more elements."""

ITEM = "tuple_get_item"
"""What rules for items of tuples are found under."""


def canonicalise(mod: ir.IRModule, rules: Mapping[str, Rule]) -> ir.IRModule:
    """Apply rules to all Relax functions, and remove what nothing reads any more.

    Each rule has the name of the operator at which it begins.  Where none applies, `mod` itself is
    returned.
    """
    builder, changed = relax.BlockBuilder(mod), False
    for gvar, func in functions_of(mod, relax.Function).items():
        if belongs_to_a_library(func):
            continue
        rewriter = Rewriter(memory_of(gvar.name_hint, func, mod), rules, sizes_of(func), builder)
        results = free_vars(func.body.body)
        builder.begin_scope(func.params)  # sizes of tensors are no less than 0
        read = _without_unread(func.body.blocks, results, rewriter.memory)
        blocks = [rewriter.block(block) for block in read]
        builder.end_scope()
        if rewriter.applied:
            blocks = _without_unread(blocks, results, rewriter.memory)
            body = relax.SeqExpr(blocks, func.body.body)
            new = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
            builder.update_func(gvar, new)
            changed = True
    return relax.transform.Normalize()(builder.get()) if changed else mod


BlockRule: TypeAlias = Callable[
    [relax.DataflowBlock, Memory, relax.BlockBuilder], "list[relax.Binding] | None"
]
"""Takes a block; returns other bindings that are the same, None to keep it."""


def with_blocks(mod: ir.IRModule, rule: BlockRule) -> ir.IRModule:
    """Rewrite the dataflow blocks of all Relax functions, and remove what nothing reads any more.

    Where the rule keeps all blocks, `mod` itself is returned.
    """
    builder, changed = relax.BlockBuilder(mod), False
    for gvar, func in functions_of(mod, relax.Function).items():
        if belongs_to_a_library(func):
            continue
        memory, blocks, rewritten = memory_of(gvar.name_hint, func, mod), [], False
        builder.begin_scope(func.params)  # sizes of tensors are no less than 0
        for block in func.body.blocks:
            plain = isinstance(block, relax.DataflowBlock)
            made = rule(block, memory, builder) if plain else None
            rewritten = rewritten or made is not None
            blocks.append(block if made is None else relax.DataflowBlock(made))
        builder.end_scope()
        if rewritten:
            changed = True
            blocks = _without_unread(blocks, free_vars(func.body.body), memory)
            body = relax.SeqExpr(blocks, func.body.body)
            new = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
            builder.update_func(gvar, new)
    return relax.transform.Normalize()(builder.get()) if changed else mod


class Rewriter:
    """Applies rules to the dataflow blocks of a function, in order, to what the last one made.

    Tensors that anything writes to are left as they are, and not looked into.  So are results of
    the function that are read inside, too: in two shapes, they would be two copies.
    """

    def __init__(
        self,
        memory: Memory,
        rules: Mapping[str, Rule],
        sizes: Analyzer,
        builder: relax.BlockBuilder,
    ):
        self.memory, self.rules, self.sizes, self.builder = memory, rules, sizes, builder
        self.applied, self.late = 0, False
        self.bindings: list[relax.Binding] = []
        self.defs: dict[relax.Var, relax.Expr] = {}
        self.names: dict[relax.Var, relax.Expr] = {}
        self.inner: dict[tuple[str | int | relax.Var, ...], list[relax.Var]] = {}
        self.read: set[Identity] = set()
        self.var = relax.Var("none")

    def block(self, block: relax.BindingBlock) -> relax.BindingBlock:
        """Return a block rewritten; itself if it is no dataflow block."""
        if not isinstance(block, relax.DataflowBlock):
            return block
        self.bindings, self.defs, self.names, self.inner = [], {}, {}, {}
        bindings = items_of(block.bindings)
        self.read = {hash(v) for binding in bindings for v in reads_of(binding.value)}
        for binding in bindings:
            self._binding(binding)
        return relax.DataflowBlock(self.bindings)

    def _binding(self, binding: relax.Binding) -> None:
        var, value = binding.var, self._renamed(binding.value)
        self.var = var
        shared = not isinstance(var, relax.DataflowVar) and hash(var) in self.read
        if shared or isinstance(binding, relax.MatchCast) or not self.memory.is_constant(var):
            self._keep(var, value, isinstance(binding, relax.MatchCast))
            return
        applied, new = self.applied, self._rewritten(value)
        if isinstance(var, relax.DataflowVar):
            if not isinstance(new, relax.Var):
                new = self._bound(new, var)
            if not new.same_as(var):
                self.names[var] = new
        elif isinstance(new, relax.Var):  # a result of the function is no other name of a tensor
            shape = shape_of(var)
            view = value if shape is None else relax.op.reshape(new, shape)
            view = self.builder.normalize(view)
            if structural_equal(view, value):
                self.applied = applied
            self._bound(view, var)
        else:
            self._bound(new, var)

    def _bound(self, value: relax.Expr, var: relax.Var) -> relax.Var:
        """Bind a value to a variable, or to one of its name where more is known of its type."""
        if isinstance(var, relax.DataflowVar) and not structural_equal(value.ty, var.ty):
            var = relax.DataflowVar(var.name, value.ty)
        if isinstance(var, relax.DataflowVar):
            self.inner.setdefault(_key(value), []).append(var)
        self.defs[var] = value
        self._keep(var, value)
        return var

    def _keep(self, var: relax.Var, value: relax.Expr, is_cast: bool = False) -> None:
        """Bind a value, with a check of its sizes where those of the variable read otherwise."""
        if is_cast or not var.ty.is_base_of(value.ty):
            self.bindings.append(relax.MatchCast(var, value, var.ty))
        else:
            self.bindings.append(relax.VarBinding(var, value))

    def _renamed(self, value: relax.Expr) -> relax.Expr:
        """Return a value with its operands renamed, and its type inferred from theirs."""
        new = substitute(value, self.names)
        if new.same_as(value) or not isinstance(new, relax.Call | relax.TupleGetItem):
            return new
        if isinstance(new, relax.Call):
            return self.builder.normalize(relax.Call(new.op, new.args, new.attrs, new.ty_args))
        return self.builder.normalize(relax.TupleGetItem(new.tuple_value, new.index))

    def _rewritten(self, value: relax.Expr) -> relax.Expr:
        """Apply rules until none has anything to say; none where there are no elements.

        A size of 0 means another one in a reshape.
        """
        while (rule := self.rules.get(_name(value))) is not None and not is_empty(value):
            self.late = False
            new = rule(self, value)
            if new is None or self.late or self.is_written(new):
                break
            self.applied += 1
            value = self.builder.normalize(new)
        return value

    def emit(self, value: relax.Expr) -> relax.Expr:
        """Bind a value that a rule made, made canonical too; return what it is called.

        A value that is bound already is not bound again.
        """
        late, new = self.late, self._rewritten(self.builder.normalize(value))
        self.late = late or self.is_written(new)
        if isinstance(new, relax.Var):
            return new
        var = self.bound(new)
        if var is None:
            var = self._bound(new, relax.DataflowVar(self.var.name, new.ty))
        return var

    def bound(self, value: relax.Expr) -> relax.Var | None:
        """Return the variable inside the block that a value is bound to already."""
        alike = self.inner.get(_key(value), ())
        return next((var for var in alike if structural_equal(self.defs[var], value)), None)

    def is_written(self, value: relax.Expr) -> bool:
        """Tell whether a value reads what is written somewhere: here it may not be what it was."""
        return not all(v in self.defs or self.memory.is_constant(v) for v in free_vars(value))

    def definition(self, expr: relax.Expr) -> relax.Expr:
        """Return the value bound to `expr`; itself if it is another's, or written to."""
        return self.defs.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def call(self, expr: relax.Expr, *ops: str) -> relax.Call | None:
        """Return the call of one of `ops` that defines `expr`, None if there is none to see."""
        value = self.definition(expr)
        return value if is_call(value, *ops) else None

    def probe(self, value: relax.Expr) -> relax.Var:
        """Return a variable that matchers take for one of this value; it is bound nowhere."""
        var = relax.DataflowVar("probe", value.ty)
        self.defs[var] = value
        return var


def sizes_of(func: relax.Function) -> Analyzer:
    """Return what the attributes of a function say of its symbolic sizes."""
    attrs, analyzer = func.attrs or {}, Analyzer()
    lower, upper = attrs.get(LOWER, {}), attrs.get(UPPER, {})
    for var in relax.analysis.defined_symbolic_vars(func):
        first, last = int(lower.get(var.name, 0)), int(upper.get(var.name, LARGEST))
        analyzer.bind(var, ir.Range(first, last + 1))
    return analyzer


def _name(value: relax.Expr) -> str:
    if isinstance(value, relax.TupleGetItem):
        return ITEM
    return operator_of(value)


def is_empty(expr: relax.Expr) -> bool:
    """Tell whether a tensor has no elements, whatever its symbolic sizes are."""
    sizes = (size for size in shape_of(expr) or () if isinstance(size, tirx.IntImm))
    return any(int(size) <= 0 for size in sizes)  # TVM infers negative ones, too


def _key(value: relax.Expr) -> tuple[str | int | relax.Var, ...]:
    """Return what equal values have in common."""
    item = (value.index,) if isinstance(value, relax.TupleGetItem) else ()
    return (_name(value), *item, *free_vars(value))


def same_type(a: relax.Expr, b: relax.Expr) -> bool:
    """Tell whether two tensors have one shape, provably, and one dtype."""
    return dtype_of(a) == dtype_of(b) and same_shape(shape_of(a), shape_of(b))


def _without_unread(
    blocks: list[relax.BindingBlock], results: list[relax.Var], memory: Memory
) -> list[relax.BindingBlock]:
    """Leave out what dataflow blocks compute by operators, or name again, and nothing reads.

    A match_cast checks sizes, or binds some that are read.
    """
    read, left = {*map(hash, results)}, []
    for block in reversed(blocks):
        kept = []
        for binding in reversed(items_of(block.bindings)):
            var, value = binding.var, binding.value
            plain = isinstance(var, relax.DataflowVar) and isinstance(binding, relax.VarBinding)
            if hash(var) in read or not plain:
                is_read = True
            else:
                effect = memory.effects.get(var)
                named = bool(_name(value)) or isinstance(value, relax.Var | relax.Tuple)
                is_read = not named or (effect is not None and bool(effect.written))
            if is_read:
                kept.append(binding)
                read.update(map(hash, reads_of(value)))
        left.append(type(block)(kept[::-1]))
    return left[::-1]
