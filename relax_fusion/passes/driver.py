"""From matches to kernels: the one place that rewrites Relax functions.

A pass is a `FusingPass` and says what it matches.  The driver walks the dataflow blocks, asks the
estimator about each match, adds a PrimFunc for each accepted one, and rebuilds the block in an
order in which every kernel comes after its inputs and before its readers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

import tvm
from tvm import ir, relax

from ..compute import build_prim_func
from ..equivalence import Checker, Mismatch
from ..errors import Decline, EquivalenceError, PipelineError, Reason
from ..estimator import Choice, choose
from ..hardware.target import device_of, require_tf32
from ..matching.pattern import BlockView, Match, Matcher, Refused, belongs_to_a_library
from ..matching.rebuild import Kernel, order, overwritten, rebuild
from ..matching.remembered import memory_of
from ..matching.shapes import elsewhere
from ..report.decision import Decision
from ..validation import shown
from ..workload import GatedFFN, NormMatmul, Workload
from .options import FuseOptions


@dataclass(frozen=True)
class FusingPass(ABC):
    """A pass that puts one kernel in the place of each chain that `match` recognises.

    A subclass is decorated as TVM's passes are, under its own name, by which reports and plans
    know it: ``@tvm.transform.module_pass(opt_level=0, name="...")``.

    Parameters
    ----------
    options : FuseOptions
        Target, plans, bounds of symbolic variables, and the list that receives decisions.
    """

    options: FuseOptions = field(default_factory=FuseOptions)

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite every function of `mod`."""
        return fuse(mod, type(self).__name__, self.match, self.options)

    @abstractmethod
    def match(self, view: BlockView, var: relax.Var) -> Match | None:
        """Return the chain that starts, or ends, at the binding of `var`; None if none does.

        Raises
        ------
        Refused
            If it is such a chain, but no kernel can take its place: by `guard`.
        """


def fuse(mod: ir.IRModule, pattern: str, matcher: Matcher, options: FuseOptions) -> ir.IRModule:
    """Replace every chain that `matcher` recognises and the estimator favours by one kernel.

    rewrite: ``a = op1(x); b = op2(a)`` -> ``b = R.call_tir(kernel, (x,))``

    Parameters
    ----------
    mod : tvm.IRModule
        A valid module; it is not modified.
    pattern : str
        Name of the pass, for reports and kernel names.
    matcher : Matcher
        Called with every variable of every dataflow block.
    options : FuseOptions
        Target, plans, bounds and the list for decisions.

    Returns
    -------
    tvm.IRModule
        The module with fused kernels, or `mod` itself if nothing was fused.
    """
    if not isinstance(options, FuseOptions):
        raise PipelineError(f"{pattern}: options is {shown(options)}; must be FuseOptions")
    fuser = _Fuser(mod, pattern, matcher, options)
    updated: dict[ir.GlobalVar, relax.Function] = {}
    for gvar, func in mod.functions_items():
        if isinstance(func, relax.Function) and not belongs_to_a_library(func):
            new = fuser.function(gvar.name_hint, func)
            if new is not None:
                updated[gvar] = new
    if not updated:
        return mod
    for gvar, func in updated.items():
        fuser.builder.update_func(gvar, func)
    return relax.transform.Normalize()(fuser.builder.get())


class _Fuser:
    """The state of one `fuse` call: the kernels so far and what the estimator needs."""

    def __init__(self, mod: ir.IRModule, pattern: str, matcher: Matcher, options: FuseOptions):
        self.mod = mod
        self.builder = relax.BlockBuilder(mod)
        self.kernels: dict[str, ir.GlobalVar] = {}
        self.pattern, self.matcher, self.options = pattern, matcher, options
        self.target = options.resolved_target()
        self.device = device_of(self.target)
        self.checker = Checker()
        if options.allow_tf32:
            require_tf32(self.target)

    def function(self, name: str, func: relax.Function) -> relax.Function | None:
        """Return the function with its chains fused, None if nothing changed."""
        blocks, changed = [], False
        memory = memory_of(name, func, self.mod)
        for block in func.body.blocks:
            view = BlockView(block, self.mod, self.options.bounds, memory)
            matches = self._matches(name, view)
            if not isinstance(block, relax.DataflowBlock):
                self._decline_impure(name, matches)
                matches = []
            found = [self._kernel(name, view, m) for m in matches]
            kernels = [k for k in found if k is not None]
            blocks.append(rebuild(view, kernels) if kernels else block)
            changed |= bool(kernels)
        if not changed:
            return None
        body = relax.SeqExpr(blocks, func.body.body)
        return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)

    def _matches(self, function: str, view: BlockView) -> list[Match]:
        """Collect matches that share no binding and can be ordered among themselves."""
        matches: list[Match] = []
        for binding in view.bindings:
            if binding.var in view.taken or isinstance(binding.value, relax.Var):
                continue  # another name of a tensor shares its memory: it is no chain of its own
            try:
                match = self.matcher(view, binding.var)
            except Refused as refusal:
                self._record(function, binding.var.name, refusal.decline)
                continue
            if match is None:
                continue
            match = self._permitted(match)
            if self._is_disabled(match.workload):
                detail = f"the workload {match.workload.key} is disabled"
                self._record(function, match.where, Decline(Reason.SCHEDULE, detail), match)
                continue
            tensors = [a.expr for a in match.args] + [o.var for o in match.outs]
            abroad = elsewhere(tensors, self.target)
            if abroad is not None:
                self._record(function, match.where, abroad, match)
            elif not view.is_free(*match.covers):
                self._decline_overlap(function, view, match)
            elif _reads_itself(view, match):
                self._decline_cycle(function, view, match)
            else:
                view.take(match)
                matches.append(match)
        return self._orderable(function, view, matches)

    def _permitted(self, match: Match) -> Match:
        """Say in a workload what the user allows."""
        work = match.workload
        if not self.options.allow_tf32 or not isinstance(work, NormMatmul | GatedFFN):
            return match
        if work.dtype != "float32":
            return match
        return replace(match, workload=replace(work, allow_tf32=True))

    def _is_disabled(self, work: Workload) -> bool:
        """Tell whether no kernel is to be made; one for which a plan was given is made."""
        given = self.options.plans.keys() & {work.key, self.pattern}
        return work.key in self.options.disable and not given

    def _orderable(self, function: str, view: BlockView, matches: list[Match]) -> list[Match]:
        """Drop, one by one, matches that cannot be ordered together with those before them."""
        if not matches or order(view, matches) is not None:
            return matches
        kept: list[Match] = []
        for match in matches:
            if order(view, [*kept, match]) is None:
                self._decline_cycle(function, view, match)
            else:
                kept.append(match)
        return kept

    def _decline_cycle(self, function: str, view: BlockView, match: Match) -> None:
        detail = overwritten(view, match)
        reason = Reason.CYCLE if detail is None else Reason.OVERWRITTEN
        detail = detail or "the kernel would need a result that depends on its own"
        self._record(function, match.where, Decline(reason, detail), match)

    def _decline_overlap(self, function: str, view: BlockView, match: Match) -> None:
        var = next(v for v in match.covers if v in view.taken)
        detail = f"{var.name} is computed by the kernel of {view.taken[var].where}"
        self._record(function, match.where, Decline(Reason.OVERLAP, detail), match)

    def _decline_impure(self, function: str, matches: list[Match]) -> None:
        detail = "the chain is not in a dataflow block, where calls may have side effects"
        for match in matches:
            self._record(function, match.where, Decline(Reason.SIDE_EFFECT, detail), match)

    def _kernel(self, function: str, view: BlockView, match: Match) -> Kernel | None:
        """Ask the estimator, and check the match; add the PrimFunc if both say yes."""
        work = match.workload
        plans = self.options.plans.get(work.key) or self.options.plans.get(self.pattern)
        options = self.options
        how = {"always": options.always_fuse, "backend": options.backend}
        choice = choose(work, self.device, plans=plans, measured=options.measured, **how)
        if isinstance(choice, Decline):
            self._record(function, match.where, choice, match)
            return None
        validation = self._validated(function, view, match)
        if isinstance(validation, Decline):
            self._record(function, match.where, validation, match)
            return None
        name = f"{_snake(self.pattern)}_{work.key}_{choice.plans.key}"
        gvar = self.kernels.get(name)
        if gvar is None:
            func = build_prim_func(work, choice.plans)
            gvar = self.builder.add_func(func.without_attr("global_symbol"), name)
            self.kernels[name] = gvar
        self._record(function, match.where, None, match, (gvar.name_hint, choice, validation))
        for where, decline in match.declined:
            self._record(function, where, decline)
        return Kernel(match, gvar)

    def _validated(self, function: str, view: BlockView, match: Match) -> str | Decline:
        """Say whether a match was checked, or refuse it."""
        if not self.options.validate:
            return ""
        found = self.checker.check(view, match)
        if not isinstance(found, Mismatch):
            return "checked" if found is None else f"not checked: {found.detail}"
        if self.options.validate == "strict":
            where = f"{self.pattern} of {match.where} in {function}"
            raise EquivalenceError(f"{where} would compute something else: {found.detail}")
        return Decline(Reason.MISMATCH, found.detail)

    def _record(
        self,
        function: str,
        where: str,
        decline: Decline | None,
        match: Match | None = None,
        made: tuple[str, Choice, str] | None = None,
    ) -> None:
        if self.options.decisions is None:
            return
        kernel, choice, validation = made if made else ("", None, "")
        chain = tuple(v.name for v in match.covers) if match else tuple(where.split(", "))
        self.options.decisions.append(
            Decision(
                self.pattern,
                match.spelling if match else "",
                function,
                where,
                kernel,
                match.workload if match else None,
                choice.plans if choice else None,
                choice.predictions if choice else (),
                decline,
                validation,
                chain,
            )
        )


def _snake(name: str) -> str:
    """Turn ``FuseRMSNormMatmul`` into ``fuse_rms_norm_matmul``."""
    out = ""
    for i, c in enumerate(name):
        starts = c.isupper() and i and (name[i - 1].islower() or name[i + 1 : i + 2].islower())
        out += f"_{c.lower()}" if starts else c.lower()
    return out


def _reads_itself(view: BlockView, match: Match) -> bool:
    """Tell whether an input of a kernel is computed from one of its own results."""
    inside = set(match.covers)
    tensors = (a.expr for a in match.args if isinstance(a.expr.ty, relax.TensorType))
    return any(view.depends_on(expr, inside) for expr in tensors)
