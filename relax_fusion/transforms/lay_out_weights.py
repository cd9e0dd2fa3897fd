"""Constant weights in the order in which the kernels of a CPU read them, once and for all calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from tvm import ir, relax, tirx
from tvm.target import Target

from ..compute import contraction_prim_func, description
from ..compute.rope import feature_of
from ..estimator.families.cpu_dots import SIGN, Word, word_of
from ..estimator.families.cpu_tiles import PANELS
from ..estimator.tile_plan import TilePlan
from ..hardware.target import is_gpu
from ..matching.expressions import found_in
from ..matching.pattern import is_call
from ..matching.shapes import dtype_of
from ..tvm_ir import GenericConst
from ..workload import DTYPE_BYTES, INTEGER_DTYPES, GatedFFN, NormMatmul
from .modules import bindings_of, functions_of, module_pass, rewritten

LAID_ATTR = "relax_fusion.laid"
"""PrimFunc attribute: panels of weights are its last inputs, in the place of the weights."""

_DTYPES = ("float32", "bfloat16", *INTEGER_DTYPES)
"""Types of weights that may be in panels: another takes twice its memory in those of float32."""


class LaidKernel(NamedTuple):
    """The kernel of a matmul that no pass of ours made, with panels in the place of the weight."""

    argument: int  # the number of the weight among its parameters
    work: NormMatmul  # what it computes
    plan: TilePlan  # by which the weight is put in panels
    kernel: tirx.PrimFunc  # it is scheduled


Maker: TypeAlias = Callable[[tirx.PrimFunc, Target], LaidKernel | None]


@module_pass
class LayOutWeights:
    """Give kernels of a CPU that pack a constant weight into panels at each call the panels.

    rewrite::

        y = R.call_tir(f, (x, w), ...)    ->    y = R.call_tir(f_laid, (x, w_in_panels), ...)

    declines when:
        a weight is no constant of `_DTYPES`, takes more memory in panels, is packed, or is read
        elsewhere, too, as one that is tied to an embedding; kernels of some sizes read it as it
        lies.

    `target`: what the kernels are for.
    `maker`: returns kernels of matmuls that no pass of ours made, for weights in panels.
    """

    target: Target
    maker: Maker | None = None

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with its constant weights laid out."""
        if is_gpu(self.target):
            return mod
        layer = _Layer(mod, self)
        made = rewritten(mod, layer)
        has_changed = bool(layer.laid) or any(layer.made.values())
        return relax.transform.DeadCodeElimination()(made) if has_changed else mod


@relax.expr_functor.mutator
class _Layer(relax.PyExprMutator):
    """Calls kernels of weights in panels, each made once."""

    def __init__(self, mod: ir.IRModule, options: LayOutWeights):
        super().__init__(mod)
        self.mod, self.reads, self.options = mod, _reads(mod), options
        self.laid: dict[ir.GlobalVar, ir.GlobalVar] = {}
        self.made: dict[ir.GlobalVar, tuple[ir.GlobalVar, LaidKernel] | None] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not is_call(call, "relax.call_tir") or len(call.args) > 2:
            return call
        work, table = description(self.mod[call.args[0]]) or (None, None)
        if work is None:
            return self._generic(call)
        if table is None or not isinstance(work, NormMatmul | GatedFFN):
            return call
        args, ((_, plan), *others) = call.args[1].fields, table.entries
        packs = _keeps_size(plan, work.dtype) and not others
        packs = packs and not (work.is_packed or work.is_adapted)
        named = {o.name: arg for o, arg in zip(work.graph.inputs, args, strict=True)}
        weights = {o.name: named.pop(o.name) for o in work.graph.inputs if o in work.graph.weights}
        if not packs or not all(map(self._is_own, weights.values())):
            return call
        arrays = {name: _array(weight) for name, weight in weights.items()}
        panels = [relax.const(each) for each in panels_of(work, plan, arrays)]
        inputs = relax.Tuple([*named.values(), *panels])
        gvar = self._kernel(call.args[0], work, plan)
        return relax.Call(call.op, [gvar, inputs], call.attrs, call.ty_args)

    def _generic(self, call: relax.Call) -> relax.Expr:
        """Return a call of the kernel of a matmul that no pass of ours made."""
        gvar, args = call.args[0], list(call.args[1].fields)
        if self.options.maker is None or not any(map(self._is_own, args)):
            return call
        if gvar not in self.made:
            found = self.options.maker(self.mod[gvar], self.options.target)
            packs = found is not None and _keeps_size(found.plan, found.work.dtype)
            self.made[gvar] = (self._added(gvar, found.kernel), found) if found and packs else None
        known = self.made[gvar]
        if known is None or not self._is_own(args[known[1].argument]):
            return call
        name, (argument, work, plan, _) = known
        n, k = work.outputs[0].columns, work.k
        shape = (n, k) if work.outputs[0].layout == "nk" else (k, n)
        weights = {"w0": _array(args[argument]).reshape(shape)}
        (args[argument],) = map(relax.const, panels_of(work, plan, weights))
        return relax.Call(call.op, [name, relax.Tuple(args)], call.attrs, call.ty_args)

    def _added(self, gvar: ir.GlobalVar, func: tirx.PrimFunc) -> ir.GlobalVar:
        func = func.with_attr(LAID_ATTR, True).without_attr("global_symbol")
        return self.builder_.add_func(func, f"{gvar.name_hint}_laid")

    def _is_own(self, weight: relax.Expr) -> bool:
        """Tell whether a weight is a constant that nothing else reads."""
        return _is_constant(weight) and self.reads[_address(weight)] == 1

    def _kernel(
        self, gvar: ir.GlobalVar, work: NormMatmul | GatedFFN, plan: TilePlan
    ) -> ir.GlobalVar:
        if gvar not in self.laid:
            func = contraction_prim_func(work, plan, gpu=False, laid=True)
            self.laid[gvar] = self._added(gvar, func.with_attrs(dict(self.mod[gvar].attrs)))
        return self.laid[gvar]


def _keeps_size(plan: TilePlan, dtype: str) -> bool:
    """Tell whether weights take as many bytes in the panels of a plan."""
    word = word_of(plan.family, dtype)
    if word is None:
        return plan.family == PANELS and dtype == "float32"
    return word.bits == 8 * DTYPE_BYTES[dtype]


def _is_constant(expr: relax.Expr) -> bool:
    return isinstance(expr, GenericConst) and dtype_of(expr) in _DTYPES


def _array(constant: relax.Expr) -> np.ndarray:
    """Return the elements of a constant without a copy; those of bfloat16 as their bits."""
    stored = constant.value
    if dtype_of(constant) == "bfloat16":
        stored = stored._create_view(stored.shape, "uint16")
    return np.from_dlpack(stored)


def _address(constant: relax.Expr) -> int:
    """Return where the elements of a constant are: several constants may have the same."""
    return int(_array(constant).ctypes.data)


def _reads(mod: ir.IRModule) -> Counter[int]:
    """Return how often constants are read, by the addresses of their elements."""
    found: Counter[int] = Counter()
    for func in functions_of(mod, relax.Function).values():
        values = [binding.value for binding, _ in bindings_of(func.body)]
        if isinstance(func.body, relax.SeqExpr):
            values.append(func.body.body)
        for value in values:
            constants = filter(_is_constant, found_in(value, GenericConst))
            found.update(_address(c) for c in constants)
    return found


def panels_of(
    work: NormMatmul | GatedFFN, plan: TilePlan, weights: Mapping[str, np.ndarray]
) -> Iterator[np.ndarray]:
    """Yield each weight as `relax_fusion.compute.accumulation.panels_of` puts it in panels."""
    word = word_of(plan.family, work.dtype)
    if isinstance(work, GatedFFN):
        arrays = [_by_columns(weights[name], work.layout) for name in sorted(weights)]
        both = np.concatenate(arrays).reshape(2, work.n, work.k)
        yield _in_panels(both, plan.reg_n, word)
        return
    for index, projection in enumerate(work.outputs):
        array = _by_columns(weights[f"w{index}"], projection.layout)
        parts, rope = array[None], projection.rope
        if rope is not None and projection.head_norm is None:
            pairs = np.arange(len(array) // 2)
            parts = array[np.stack([feature_of(rope, part, pairs) for part in range(2)])]
        yield _in_panels(parts, plan.reg_n, word)


def _by_columns(weight: np.ndarray, layout: str) -> np.ndarray:
    return weight if layout == "nk" else weight.T


def _in_panels(parts: np.ndarray, width: int, word: Word | None) -> np.ndarray:
    """Return ``[parts, n, k]`` as ``[panels, k, parts, width]``, its last column repeated.

    Neighbours along k become words.
    """
    if word is not None:
        bits = np.ascontiguousarray(parts).view(f"u{word.bits // 8}")
        parts = (bits ^ bits.dtype.type(SIGN * word.is_flipped)).view(np.uint32)
    count, n, k = parts.shape
    columns = np.minimum(np.arange(-(-n // width) * width), n - 1)
    panels = parts[:, columns].reshape(count, -1, width, k)
    return np.ascontiguousarray(panels.transpose(1, 3, 0, 2))
