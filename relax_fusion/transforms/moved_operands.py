"""Operands that kernels read where the tensor lies that they were moved from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from tvm import ir, relax, tirx
from tvm.target import Target

from ..compute import description
from ..hardware.target import is_gpu
from ..matching.effects import Memory, free_vars
from ..matching.pattern import is_call
from ..matching.stages import is_view
from ..report.decision import Joining
from .modules import functions_of, module_pass, rewritten, with_functions
from .moved_formula import MOST_LOADS, MOVED_ATTR, Formula, composed, with_moved


@module_pass
class ComposeMovements:
    """Make one block of the movements in a PrimFunc that only moves elements of one tensor.

    rewrite: ``a[i, j] = x[j, i]; b[i, j] = a[(i + 2) % 8, j]`` -> ``b[i, j] = x[j, (i + 2) % 8]``

    declines when:
        it is for a GPU, or reads several tensors; a size is symbolic; an element is chosen of more
        than 8.
    """

    target: Target

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with such functions marked."""
        if is_gpu(self.target):
            return mod
        funcs = functions_of(mod, tirx.PrimFunc).items()
        made = {gvar: composed(func) for gvar, func in funcs}
        return with_functions(mod, {gvar: func for gvar, func in made.items() if func is not None})


@module_pass
class ReadMoved:
    """Let the fused kernels that alone read a moved tensor read it where it was.

    rewrite::

        p = R.call_tir(patches, (x,))            # p[i, j, k] = x[2 * i + k, j]
        y = R.call_tir(f, (R.reshape(p), w))     # reads p[i, k // 3, k % 3]
            ->
        y = R.call_tir(f_moved, (x, w))          # reads x[2 * i + k % 3, k // 3]

    declines when:
        something else than fused kernels reads the moved tensor; one of these reads an element more
        than twice, unless rows are moved as a whole, or not by loads.

    What writes in place stands between dataflow blocks, by `SeparateWrites`.
    """

    target: Target
    """What the kernels are for: a CPU's read operands by loads."""
    record: list[Joining] | None = field(default=None)
    """Receives the movements that kernels have taken."""

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every function of `mod`; what nothing calls any more goes."""
        funcs = functions_of(mod, tirx.PrimFunc).items()
        marked = {gvar for gvar, func in funcs if (func.attrs or {}).get(MOVED_ATTR)}
        if is_gpu(self.target) or not marked:
            return mod
        reader = _Reader(mod, marked, self.record)
        made = rewritten(mod, reader, memory=True)
        return relax.transform.DeadCodeElimination()(made) if any(reader.kernels.values()) else mod


_Operands = dict[tuple[relax.Var, int], tuple[relax.Expr, Formula]]
"""By a call and the number of its operand, the tensor that is read there, and as what."""


@relax.expr_functor.mutator
class _Reader(relax.PyExprMutator):
    memory: Memory
    function: str

    def __init__(self, mod: ir.IRModule, marked: set[ir.GlobalVar], record: list[Joining] | None):
        super().__init__(mod)
        self.mod, self.marked, self.record = mod, marked, record
        self.formulas: dict[ir.GlobalVar, Formula | None] = {}
        self.kernels: dict[tuple[object, ...], ir.GlobalVar | None] = {}

    def visit_function_(self, func: relax.Function) -> relax.Expr:
        self.readers: dict[relax.Var, list[relax.Var]] = {}
        for var, value in self.memory.values.items():
            for read in free_vars(value):
                self.readers.setdefault(read, []).append(var)
        self.sources: _Operands = {}
        for var, value in self.memory.values.items():
            if is_call(value, "relax.call_tir") and value.args[0] in self.marked:
                self.sources = {**self._taken(var, value), **self.sources}
        return super().visit_function_(func)

    def _formula(self, value: relax.Expr) -> Formula | None:
        """Return that of a call of a movement or a view."""
        if not is_call(value, "relax.call_tir") or len(value.args[1].fields) != 1:
            return None
        gvar = value.args[0]
        if gvar not in self.formulas:
            func = self.mod[gvar]
            taken = gvar in self.marked or is_view(func)
            self.formulas[gvar] = Formula.of(func) if taken else None
        return self.formulas[gvar]

    def _taken(self, moved: relax.Var, value: relax.Expr) -> _Operands:
        """Return what each operand is that a moved tensor is read as, none if it is needed."""
        source, formula, found = value.args[1].fields[0], self._formula(value), _Operands()
        ends = None if formula is None else self._ends(moved, formula.simple())
        for var, index, here in ends or ():
            if self._kernel(var, {index: here}) is None:
                return {}
            found[var, index] = source, here
        return found

    def _ends(
        self, var: relax.Var, formula: Formula
    ) -> list[tuple[relax.Var, int, Formula]] | None:
        """Return the fused kernels that read a tensor, or views of it; None if others do."""
        readers, found = self.readers.get(var, []), []
        if not isinstance(var, relax.DataflowVar) or not readers:
            return None
        for reader in readers:
            value = self.memory.values[reader]
            behind = self._formula(value)
            if behind is not None:
                made = behind.behind(formula).simple()
                ends = self._ends(reader, made) if made.loads <= MOST_LOADS else None
                if ends is None:
                    return None
                found += ends
                continue
            if not is_call(value, "relax.call_tir") or description(self.mod[value.args[0]]) is None:
                return None
            args = enumerate(value.args[1].fields)
            found += [(reader, i, formula) for i, arg in args if arg.same_as(var)]
        return found

    def _kernel(self, var: relax.Var, operands: Mapping[int, Formula]) -> ir.GlobalVar | None:
        """Return the kernel of a call that reads these operands where they were."""
        callee = self.memory.values[var].args[0]
        key = callee, *((i, str(f.value), f.shape, str(f.source.ty)) for i, f in operands.items())
        if key not in self.kernels:
            func: tirx.PrimFunc | None = self.mod[callee]
            for index, formula in operands.items():
                func = None if func is None else with_moved(func, index, formula)
            name = f"{callee.name_hint}_moved"
            self.kernels[key] = None if func is None else self.builder_.add_func(func, name)
        return self.kernels[key]

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var, call = binding.var, binding.value
        mine = {i: found for (reader, i), found in self.sources.items() if reader.same_as(var)}
        gvar = self._kernel(var, {i: formula for i, (_, formula) in mine.items()}) if mine else None
        if gvar is not None:
            args = [mine[i][0] if i in mine else a for i, a in enumerate(call.args[1].fields)]
            rest = [relax.Tuple(args), *call.args[2:]]
            call = relax.Call(call.op, [gvar, *rest], call.attrs, call.ty_args)
            binding = relax.VarBinding(var, call)
            if self.record is not None:
                self.record.append(Joining(self.function, var.name, ("moved", gvar.name_hint)))
        super().visit_var_binding_(binding)
