"""The pass that has the attention of a new token write its key and value into the caches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax, tirx

from ..compute import description
from ..estimator.ranges import served
from ..matching.expressions import found_in
from ..matching.pattern import is_call
from ..transforms.modules import APPEND_ATTR, functions_of, module_pass, with_functions
from ..workload import Attention
from .attention_call import APPENDS_ATTR
from .operands import named_operands


@dataclass(frozen=True)
class _Site:
    """An append, and the attention behind it, which is to do both."""

    append: relax.VarBinding
    parts: tuple[relax.VarBinding, ...]
    attention: relax.VarBinding
    caches: tuple[int, int]

    @property
    def new(self) -> list[relax.Expr]:
        """What keys and values are appended from: one tensor, or two."""
        args = self.append.value.args[1].fields
        return [args[0], args[len(args) - 4]]

    @property
    def rows(self) -> list[tuple[list[int] | None, str]]:
        """Sizes of `new` behind the batch, None unless each is known; and their type."""
        return [(_known(tensor.ty.shape.values[1:]), str(tensor.ty.dtype)) for tensor in self.new]

    def same(self, other: _Site) -> bool:
        """Tell whether one PrimFunc serves both."""
        called = self.append.value.args[0].same_as(other.append.value.args[0])
        return called and self.rows == other.rows


@module_pass
class AppendInAttention:
    """Have the attention of a single query append that token's key and value to the caches.

    rewrite::

        keys, values = R.call_tir_inplace(append, (qkv, k_cache, v_cache, length))
        o = R.call_tir(attention, (qkv, keys, values, length, n))
        ->
        o, keys, values = R.call_tir_inplace(
            attention, (qkv, k_cache, v_cache, length, n, qkv, qkv))

    `append` has the attribute `APPEND_ATTR`.  A launch less stands between the projection and the
    attention, which asks for the keys so far while the projection still runs.

    declines when: there is more than one query, or row that is appended; the last key is not that
    one; plans are not all of the kernel that reads keys through pointers; one of the calls of a
    fused function has no such append, or another; the caches are read in between, or anything is
    changed in place.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with attentions that append."""
        sites: dict[ir.GlobalVar, list[_Site]] = defaultdict(list)
        calls: dict[ir.GlobalVar, int] = defaultdict(int)
        functions = functions_of(mod, relax.Function)
        for func in functions.values():
            for call in found_in(func, ir.Call):
                if is_call(call, "relax.call_tir"):
                    calls[call.args[0]] += 1
            for site in _sites(mod, func):
                sites[site.attention.value.args[0]].append(site)
        taken = {
            gvar: found
            for gvar, found in sites.items()
            if len(found) == calls[gvar] and all(found[0].same(site) for site in found)
        }
        if not taken:
            return mod
        builder = relax.BlockBuilder(with_functions(mod, {}, without=taken))
        every: dict[relax.Var, tuple[ir.GlobalVar, _Site]] = {}
        for gvar, found in taken.items():
            # Of another signature, so another variable, under the same name
            made = builder.add_func(_appending(mod[gvar], mod, found[0]), gvar.name_hint)
            every |= {site.attention.var: (made, site) for site in found}
        rewritten = {gvar: _rewritten(func, every) for gvar, func in functions.items()}
        return relax.transform.DeadCodeElimination()(with_functions(builder.get(), rewritten))


def _sites(mod: ir.IRModule, func: relax.Function) -> list[_Site]:
    """Return the appends of a function that an attention can do."""
    if not isinstance(func.body, relax.SeqExpr):
        return []
    bindings = [b for block in func.body.blocks for b in block.bindings]
    users: dict[relax.Var, list[relax.Binding]] = defaultdict(list)
    for binding in bindings:
        for var in found_in(binding.value, relax.Var):
            users[var].append(binding)
    found = []
    for at, binding in enumerate(bindings):
        call = binding.value
        if not is_call(call, "relax.call_tir_inplace"):
            continue
        if APPEND_ATTR in (mod[call.args[0]].attrs or {}):
            site = _site(mod, binding, users)
            if site is not None and _unchanged_until(bindings[at + 1 :], site.attention):
                found.append(site)
    return found


def _unchanged_until(bindings: Sequence[relax.Binding], last: relax.Binding) -> bool:
    """Tell whether nothing that is done until the last of some bindings changes any memory."""
    for binding in bindings:
        value = binding.value
        if isinstance(value, relax.Call) and not is_call(value, "relax.call_tir", "relax.reshape"):
            return False
        if binding is last:
            return True
    return False


def _site(
    mod: ir.IRModule, append: relax.VarBinding, users: dict[relax.Var, list[relax.Binding]]
) -> _Site | None:
    """Return the attention behind an append, if nothing else reads the caches before it."""
    *_, end = append.value.args[1].fields
    parts = tuple(users[append.var])
    if len(parts) != 2 or not all(isinstance(b.value, relax.TupleGetItem) for b in parts):
        return None
    keys, values = (b.var for b in sorted(parts, key=lambda b: int(b.value.index)))
    attention = users[keys][0] if users[keys] else None
    if attention is None or not is_call(attention.value, "relax.call_tir"):
        return None
    if not any(attention is b for b in users[values][:1]):
        return None
    func, args = mod[attention.value.args[0]], list(attention.value.args[1].fields)
    work, plans = description(func) or (None, None)
    if not isinstance(work, Attention) or plans is None or not _is_step(work):
        return None
    if any(plan.family != "attention" for _, plan in served(work, plans)):
        return None
    of = named_operands(work, args)
    if not (of["k"].same_as(keys) and of["v"].same_as(values) and of["lengths"].same_as(end)):
        return None
    if sum(a.same_as(keys) or a.same_as(values) for a in args) != 2:
        return None
    places = [i for c in (keys, values) for i, a in enumerate(args) if a.same_as(c)]
    site = _Site(append, parts, attention, (places[0], places[1]))
    return site if all(sizes and sizes[0] == 1 for sizes, _ in site.rows) else None


def _known(sizes: Sequence[tirx.Expr]) -> list[int] | None:
    """Return sizes as integers, None if one is not known."""
    found = [int(size) for size in sizes if isinstance(size, tirx.IntImm)]
    return found if len(found) == len(sizes) else None


def _is_step(work: Attention) -> bool:
    """Tell whether the last key is that of the only query, by a tensor that tells those before."""
    one = work.q_len == 1 and work.k_in is None and work.v_in is None
    counted = work.lengths is not None and work.lengths.more == 1 and not work.lengths.by_batch
    return one and counted and work.kv_layout == "bsnh"


def _appending(func: tirx.PrimFunc, mod: ir.IRModule, site: _Site) -> tirx.PrimFunc:
    """Return the function with parameters for a new key and value in front of its result."""
    batch = func.params[site.caches[0]].ty.shape[0]
    new = [
        tirx.decl_buffer([batch, *(tirx.IntImm("int64", n) for n in sizes or ())], dtype, name)
        for name, (sizes, dtype) in zip(("new_k", "new_v"), site.rows, strict=True)
    ]
    heads = mod[site.append.value.args[0]].attrs[APPEND_ATTR]
    params = [*func.params[:-1], *new, func.params[-1]]
    return tirx.PrimFunc(params, func.body, func.ret_type, func.attrs, func.span).with_attr(
        APPENDS_ATTR, heads
    )


def _rewritten(
    func: relax.Function, sites: dict[relax.Var, tuple[ir.GlobalVar, _Site]]
) -> relax.Function:
    """Return a function whose attentions append; `sites` have what to call there."""
    gone = {b.var for _, s in sites.values() for b in (s.append, *s.parts)}
    blocks = []
    for block in func.body.blocks if isinstance(func.body, relax.SeqExpr) else ():
        bindings: list[relax.Binding] = []
        for binding in block.bindings:
            if binding.var in sites:
                bindings += _both(*sites[binding.var], isinstance(block, relax.DataflowBlock))
            elif binding.var not in gone:
                bindings.append(binding)
        blocks.append(type(block)(bindings))
    if not gone or not blocks:
        return func
    body = relax.SeqExpr(blocks, func.body.body)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)


def _both(func: ir.GlobalVar, site: _Site, in_dataflow: bool) -> list[relax.Binding]:
    """Return the bindings in the place of an attention: a call, and its three results."""
    args = list(site.attention.value.args[1].fields)
    caches = site.append.value.args[1].fields[-3:-1]
    for place, cache in zip(site.caches, caches, strict=True):
        args[place] = cache
    out: Any = site.attention.value.ty_args[0]
    types = [out, *(cache.ty for cache in caches)]
    call = relax.op.call_tir_inplace(
        func, relax.Tuple([*args, *site.new]), [-1, *site.caches], types
    )
    made = (relax.DataflowVar if in_dataflow else relax.Var)("appended", ir.TupleType(types))
    parts = sorted(site.parts, key=lambda b: int(b.value.index))
    results = [site.attention.var, *(b.var for b in parts)]
    taken = [relax.VarBinding(v, relax.TupleGetItem(made, i)) for i, v in enumerate(results)]
    return [relax.VarBinding(made, call), *taken]
