"""From proposals to kernels: the one place that rewrites Relax functions.

A pass is a `FusingPass` and says what it would take.  The driver asks all that run together about
every binding of the dataflow blocks, has the estimator price what they propose, takes the set that
saves the most, adds a PrimFunc for each, and rebuilds the block in an order in which every kernel
comes after its inputs and before its readers.  Then it asks again those whose proposals came too
short: what is left around the kernels may be something for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import tvm
from tvm import ir, relax

from ..compute import build_prim_func
from ..errors import PipelineError
from ..estimator import Choice, saved_s
from ..matching.known_effects import memory_of
from ..matching.pattern import BlockView, Match, belongs_to_a_library
from ..matching.rebuild import Kernel, rebuild
from ..report.decision import Decision
from ..validation import shown
from .allowed import require_int8_rows, require_tf32
from .block_round import Form, Round, Setting
from .options import FuseOptions
from .record import Record
from .selection import Proposal


@dataclass(frozen=True)
class FusingPass(ABC):
    """A pass that puts one kernel in the place of each chain that `match` recognises.

    A subclass is decorated by `module_pass`.  Reports and plans know it by its name.

    Parameters
    ----------
    options : FuseOptions
        Target, plans, bounds of symbolic variables, and the list that receives decisions.
    """

    options: FuseOptions = field(default_factory=FuseOptions)

    reads_results: ClassVar[bool] = False
    """Whether it looks through what other kernels leave behind them: its own are made last."""

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite every function of `mod`."""
        return fuse(mod, [self], self.options)

    @abstractmethod
    def match(self, view: BlockView, var: relax.Var) -> Match | Sequence[Match] | None:
        """Return what kernels could take at the binding of `var`; None if nothing starts there.

        Of several matches, and of those of other passes, at most one gets each binding.

        Raises
        ------
        Refused
            If it is a chain of this pass, but no kernel can take its place: by `guard`.
        """

    def saved_s(self, match: Match, choice: Choice) -> float:
        """Return the seconds that the kernel of a match saves by its plans.

        Raises
        ------
        Refused
            If it saves less than something beside it takes longer then.
        """
        return saved_s(choice)


def fuse(mod: ir.IRModule, passes: Sequence[FusingPass], options: FuseOptions) -> ir.IRModule:
    """Replace chains that passes recognise by kernels, as saves the most by the estimator.

    rewrite: ``a = op1(x); b = op2(a)`` -> ``b = R.call_tir(kernel, (x,))``

    `mod`: a valid module; it is not modified, and returned itself if nothing was fused.
    `passes`: who proposes.  Of two proposals that save as much, that of the pass in front is taken.
    `options`: target, plans, bounds and the list for decisions.
    """
    if not isinstance(options, FuseOptions):
        names = ", ".join(type(one).__name__ for one in passes)
        raise PipelineError(f"{names}: options is {shown(options)}; must be FuseOptions")
    fuser = _Fuser(mod, passes, options)
    updated: dict[ir.GlobalVar, relax.Function] = {}
    decisions: list[Decision] = []
    for gvar, func in mod.functions_items():
        if isinstance(func, relax.Function) and not belongs_to_a_library(func):
            record = Record(gvar.name_hint, func, [*fuser.setting.passes])
            new = fuser.function(func, record)
            decisions += record.decisions()
            if new is not func:
                updated[gvar] = new
    if options.decisions is not None:
        options.decisions.extend(decisions)
    if not updated:
        return mod
    for gvar, func in updated.items():
        fuser.builder.update_func(gvar, func)
    return relax.transform.Normalize()(fuser.builder.get())


class _Fuser:
    """The state of one `fuse` call: the kernels so far and what the estimator needs."""

    def __init__(self, mod: ir.IRModule, passes: Sequence[FusingPass], options: FuseOptions):
        target = options.resolved_target()
        by_name = {type(one).__name__: one for one in passes}
        self.mod, self.options = mod, options
        self.builder = relax.BlockBuilder(mod)
        self.kernels: dict[str, ir.GlobalVar] = {}
        self.setting = Setting(by_name, options, target, options.resolved_device())
        if options.allow_tf32:
            require_tf32(target)
        if options.allow_int8_rows:
            require_int8_rows(target)

    def function(self, func: relax.Function, record: Record) -> relax.Function:
        """Return the function with its chains fused, itself if nothing changed.

        Passes are asked again, once kernels are made, of whose proposals something is left.
        """
        asked, failed = set(self.setting.passes), set[Form]()
        while asked:
            mod = self.builder.get() if self.kernels else self.mod
            memory = memory_of(record.function, func, mod)
            blocks: list[relax.BindingBlock] = []
            changed, known, again = False, len(failed), set[str]()
            for block in func.body.blocks:
                view = BlockView(block, mod, self.options.bounds, memory)
                one = Round(self.setting, view, record, failed)
                kernels = [self._kernel(record, *taken) for taken in one.taken(asked)]
                blocks.append(rebuild(view, kernels) if kernels else block)
                changed |= bool(kernels)
                again |= one.again
            if changed:
                body = relax.SeqExpr(blocks, func.body.body)
                func = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
            asked = again if changed or len(failed) > known else set()
        return func

    def _kernel(self, record: Record, proposal: Proposal, validation: str) -> Kernel:
        """Add the PrimFunc of a proposal, if it is new."""
        work, choice = proposal.match.workload, proposal.choice
        assert choice is not None, "only what was priced is made"
        name = f"{_snake(proposal.pattern)}_{work.key}_{choice.plans.key}"
        gvar = self.kernels.get(name)
        if gvar is None:
            func = build_prim_func(work, choice.plans)
            gvar = self.builder.add_func(func.without_attr("global_symbol"), name)
            self.kernels[name] = gvar
        record.made(proposal, gvar.name_hint, validation)
        return Kernel(proposal.match, gvar)


def _snake(name: str) -> str:
    """Turn ``FuseRMSNormMatmul`` into ``fuse_rms_norm_matmul``."""
    out = ""
    for i, c in enumerate(name):
        starts = c.isupper() and i and (name[i - 1].islower() or name[i + 1 : i + 2].islower())
        out += f"_{c.lower()}" if starts else c.lower()
    return out
