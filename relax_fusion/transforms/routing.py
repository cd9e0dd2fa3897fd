"""Which experts each row goes to, and their shares: one kernel."""

from __future__ import annotations

from typing import Any

from tvm import ir, relax, tirx
from tvm.target import Target

from ..compute.routing import scheduled
from ..matching.constants import filled
from ..matching.effects import Memory
from ..matching.movements import cut_of
from ..matching.pattern import BlockView, is_call, operator_of
from ..matching.places import MOVES, moved_place
from ..matching.shapes import dtype_of, elsewhere, product, shape_of
from ..report.decision import Decision
from ..tvm_ir import GenericConst
from .modules import module_pass, with_kernels
from .routing_kernel import ARITHMETIC, FUNCTIONS, STAGES, RoutingKernel, lead_of, sizes

MOST_EXPERTS = 1024
"""The most elements of a row: each is compared with every other."""

_ELEMENTS = (
    *(*ARITHMETIC, *FUNCTIONS, *MOVES, "relax.astype", "relax.where"),
    *("relax.bitwise_not", "relax.logical_not", "relax.full_like", "relax.concat"),
    *("relax.strided_slice", "relax.clip"),
)


@module_pass
class RouteExperts:
    """Choose experts, and compute their shares, in one kernel.

    rewrite::

        p = R.nn.softmax(logits); best = R.topk(p, k, ret_type="both")
        share = R.divide(best[0], R.sum(best[0], axis=[-1], keepdims=True)); ids = best[1]
            ->
        both = R.call_tir(routing, (logits,)); share = both[0]; ids = both[1]

    Functions of elements, softmax, sums of rows, further choices (of groups of experts), and
    elements that are looked up or marked by what was chosen are taken along.  Of equal elements the
    first is chosen, as by TVM's ``topk``, and NaN counts as infinity.

    declines when:
        there are more than 1024 elements, or a size but that of rows is only known at run time; the
        smallest are chosen; numbers are of float64; what is read between is computed of what is
        chosen elsewhere.

    Parameters
    ----------
    target : Target
        What the kernel is scheduled for.
    decisions : list of Decision, optional
        Receives a record of every kernel.
    """

    target: Target
    decisions: list[Decision] | None = None

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        rewriter = _Rewrite(mod, self.target)
        rewriter.decisions = self.decisions if self.decisions is not None else []
        return with_kernels(mod, rewriter, lambda func: scheduled(func, self.target))


def _is_step(view: BlockView, var: relax.Var) -> bool:
    """Tell whether a binding may be part of a routing."""
    value = view.defs[var]
    if var in view.casts or view.escapes(var):
        return False
    if isinstance(value, relax.TupleGetItem):
        return view.call(value.tuple_value, "relax.topk") is not None
    name = operator_of(value)
    if name == "relax.topk":
        return _is_choice(value)
    shape = shape_of(var) if isinstance(var.ty, relax.TensorType) else None
    if not shape or not _is_small(shape) or name not in (*STAGES, *_ELEMENTS):
        return False
    rank = len(shape)
    if dtype_of(var) == "float64":  # kernels compute in float32
        return False
    if name == "relax.subtract" and value.args[0].same_as(value.args[1]):
        return False  # TIR takes that for zero, also of NaN and infinities
    if name == "relax.strided_slice":
        cut = cut_of(view, var)
        return cut is not None and cut.axis == rank - 1
    if name == "relax.concat":
        along = int(value.attrs.axis or 0) % rank == rank - 1
        fields = value.args[0].fields if isinstance(value.args[0], relax.Tuple) else ()
        return along and bool(fields) and all(map(_is_known, fields))
    if name in MOVES:
        rows = tuple(tirx.Var("i", "int64") for _ in shape)
        return shape_of(value.args[0]) is not None and moved_place(value, rows) is not None
    if name in ("relax.nn.softmax", "relax.gather_elements"):
        return int(value.attrs.axis) % rank == rank - 1
    if name == "relax.clip" and not all(isinstance(a, tirx.FloatImm) for a in value.args[1:]):
        return False
    if name == "relax.sum":
        return _sums_rows(value) and "float" in dtype_of(var)
    if name == "relax.scatter_elements":
        return _marks(view, value)
    return all(shape_of(a) is not None for a in value.args if isinstance(a.ty, relax.TensorType))


def _is_known(expr: relax.Expr) -> bool:
    """Tell whether the last size of a tensor is known, and no large one."""
    shape = shape_of(expr)
    return bool(shape) and shape is not None and _is_small(shape)


def _is_small(shape: list[Any]) -> bool:
    return isinstance(shape[-1], tirx.IntImm) and int(shape[-1]) <= MOST_EXPERTS


def _is_choice(call: relax.Call) -> bool:
    shape, attrs = shape_of(call.args[0]), call.attrs
    if shape is None or len(shape) < 2 or not _is_small(shape):
        return False
    last = int(attrs.axis) % len(shape) == len(shape) - 1
    floats = dtype_of(call.args[0]) in ("float32", "float16", "bfloat16")
    largest = attrs.ret_type == "both" and bool(attrs.largest)
    return last and floats and largest and 0 < int(attrs.k) <= int(shape[-1])


def _sums_rows(call: relax.Call) -> bool:
    rank = len(sizes(call.args[0]))
    return call.attrs.axis is not None and [int(a) % rank for a in call.attrs.axis] == [rank - 1]


def _marks(view: BlockView, call: relax.Call) -> bool:
    """Tell whether a scatter writes one number to elements of rows."""
    rank = len(sizes(call.args[0]))
    last = int(call.attrs.axis) % rank == rank - 1 and str(call.attrs.reduction) == "update"
    return last and filled(view, call.args[2]) is not None


class _Region:
    """The steps around a choice, what they read, and what of them is read."""

    def __init__(self, view: BlockView, seed: relax.Var):
        self.view = view
        self.inside: dict[relax.Var, None] = {}
        among = (v.args[0] for v in view.defs.values() if is_call(v, "relax.topk"))
        self._most = 2 * max(int(sizes(x)[-1]) for x in among if _is_known(x))
        self._grow(seed)
        self._trim()
        choices = [v for v in self.inside if is_call(view.defs[v], "relax.topk")]
        last = max(choices, key=view.index.__getitem__, default=None)
        source = [] if last is None else sizes(view.defs[last].args[0])
        self.rows = product(source[:-1]) if source else None
        self._leave_what_all_rows_share()
        self.outputs = [v for v in self.inside if self._readers(v)]

    def _grow(self, seed: relax.Var) -> None:
        waiting, view = [seed], self.view
        while waiting:
            var = waiting.pop()
            if var in self.inside or not self._is_step(var):
                continue
            outside = [r for r in view.reads[var] if r in view.index and r not in self.inside]
            if var is not seed and not all(self._follows(r, seed) for r in outside):
                continue
            self.inside[var] = None
            waiting += [r for r in view.reads[var] if r in view.index]
            waiting += [u for u in view.uses(var) if view.index[u] > view.index[var]]

    def _is_step(self, var: relax.Var) -> bool:
        """Tell whether a binding is a step, and no row of features that are weighed."""
        wide = isinstance(var.ty, relax.TensorType) and sizes(var)[-1:]
        return _is_step(self.view, var) and not (wide and int(wide[0]) > self._most)

    def _follows(self, var: relax.Var, seed: relax.Var) -> bool:
        """Tell whether a value is there before the choice, constant, or made of it by steps."""
        waiting, index, seen = [var], self.view.index, set[relax.Var]()
        while waiting:
            each = waiting.pop()
            if each in seen or each in self.inside or index.get(each, -1) <= index[seed]:
                continue
            if isinstance(self.view.defs[each], GenericConst):
                continue
            if not self._is_step(each):
                return False
            seen.add(each)
            waiting += self.view.reads[each]
        return True

    def _readers(self, var: relax.Var) -> list[relax.Var]:
        return [u for u in self.view.uses(var) if u not in self.inside]

    def _trim(self) -> None:
        """Leave movements at the end to what reads them."""
        found = True
        while found:
            found = False
            for var in [*self.inside]:
                moves = is_call(self.view.defs[var], *MOVES, "relax.full_like")
                if moves and (self._readers(var) or not self.view.uses(var)):
                    del self.inside[var]
                    found = True

    def _leave_what_all_rows_share(self) -> None:
        """Leave steps in front that are of no row, as a bias that is reshaped."""
        for var in sorted(self.inside, key=self.view.index.__getitem__):
            of_rows = not isinstance(var.ty, relax.TensorType) or (
                lead_of(sizes(var), self.rows) is not None
            )
            if not of_rows and not any(r in self.inside for r in self.view.reads[var]):
                del self.inside[var]

    @property
    def reads(self) -> list[relax.Expr]:
        """What is read from elsewhere."""
        view = self.view
        found = {hash(r): r for v in self.inside for r in view.reads[v] if r not in self.inside}
        return [*found.values()]

    @property
    def place(self) -> int:
        """In front of which binding the kernel has to be."""
        return min(self.view.index[u] for v in self.outputs for u in self._readers(v))

    def is_whole(self) -> bool:
        """Tell whether one kernel can take the place of the region."""
        view = self.view
        if self.rows is None or not self.outputs:
            return False
        tensors = all(isinstance(v.ty, relax.TensorType) for v in self.outputs)
        before = all(
            view.index.get(r, -1) < self.place for r in self.reads if isinstance(r, relax.Var)
        )
        shapes = [sizes(v) for v in self.inside if isinstance(v.ty, relax.TensorType)]
        counted = all(lead_of(shape, self.rows) is not None for shape in shapes)
        return tensors and before and counted and all(map(view.memory.is_constant, self.reads))


@relax.expr_functor.mutator
class _Rewrite(relax.PyExprMutator):
    memory: Memory
    function: str
    decisions: list[Decision]

    def __init__(self, mod: ir.IRModule, target: Target):
        super().__init__(mod)
        self.mod, self.target = mod, target
        self.regions: dict[relax.Var, list[_Region]] = {}
        self.made: dict[ir.GlobalVar, None] = {}

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        view = BlockView(block, self.mod, memory=self.memory)
        taken, self.regions = set[relax.Var](), {}
        for var, value in view.defs.items():
            if var in taken or not is_call(value, "relax.topk") or not _is_choice(value):
                continue
            region = _Region(view, var)
            taken.update(region.inside)
            at_home = elsewhere([*region.reads, *region.inside], self.target) is None
            if at_home and region.is_whole():
                first = view.bindings[region.place].var
                self.regions.setdefault(first, []).append(region)
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        for region in self.regions.pop(binding.var, ()):
            kernel = RoutingKernel(region.view, region.inside, region.outputs, region.rows)
            reads = [self.visit_expr(read) for read in kernel.find_operands()]
            call = self.builder_.call_te(kernel.compute, *reads, primfunc_name_hint="routing")
            self.made[call.args[0]] = None
            made = self.builder_.emit(call)
            outputs, inside = ([v.name for v in each] for each in (region.outputs, region.inside))
            told = "RouteExperts", "routing", self.function, ", ".join(outputs)
            decision = Decision(*told, call.args[0].name_hint, chain=tuple(inside))
            self.decisions.append(decision)
            several = len(region.outputs) > 1
            for index, var in enumerate(region.outputs):
                item = self.builder_.emit(relax.TupleGetItem(made, index)) if several else made
                self.set_var_remap(var, item)
        super().visit_var_binding_(binding)
