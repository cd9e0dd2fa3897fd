"""The decisions of one compilation: as data, as text, as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import InstanceOf, SkipValidation

from ..errors import PipelineError
from ..validation import check, json_text
from .calls import Call, calls_of
from .coverage import Coverage, Launches, Leftover, coverage_of
from .decision import Decision, Joining, LeftOut, Rewrite, Scheduling
from .item import Item
from .material import Material
from .record import record_of
from .tables import report_text


@dataclass
class Report:
    """Collects what the fusing passes decided, and which rule scheduled which kernel.

    Parameters
    ----------
    decisions : list of Decision
        In the order in which they were made; pass the report to the pipeline to have it filled.
    schedules : list of Scheduling
        One for each PrimFunc, in the order of the module.
    leftovers : list of Leftover
        One for each operation of transformers that is in no fused kernel, with the reason.
    work : list of Item
        What each function multiplies, fused or not: sizes, bytes and operations follow.
    kernels : dict of str to str
        By the name of each PrimFunc a hash of its code; filled when kernels are scheduled.
    device : str
        What was compiled for; the pipeline fills it in.  Where the target names no device, the one
        whose numbers were taken instead is named here.
    material : Material
        What a page shows beside all that; the pipeline fills it in.
    left_out : list of LeftOut
        Passes and chains without which a module was compiled, as it could not be with them.
    rewrites : list of Rewrite
        One for each part of a graph that an algebraic rule replaced.
    recorded : list of Call, optional
        What a file says that calls take; None where they are predicted when they are asked for.
    joined : list of Joining
        Operators that no pattern took and one kernel computes, and those that two do for less.
    """

    decisions: Annotated[list[Decision], InstanceOf()] = field(default_factory=list)
    schedules: Annotated[list[Scheduling], InstanceOf()] = field(default_factory=list)
    leftovers: Annotated[list[Leftover], InstanceOf()] = field(default_factory=list)
    work: Annotated[list[Item], InstanceOf()] = field(default_factory=list)
    kernels: Annotated[dict[str, str], InstanceOf()] = field(default_factory=dict)
    device: str = ""
    material: Annotated[Material, InstanceOf()] = field(default_factory=Material)
    left_out: Annotated[list[LeftOut], InstanceOf()] = field(default_factory=list)
    rewrites: Annotated[list[Rewrite], InstanceOf()] = field(default_factory=list)
    recorded: Annotated[list[Call] | None, SkipValidation] = None
    joined: Annotated[list[Joining], InstanceOf()] = field(default_factory=list)

    def __post_init__(self) -> None:
        check(self, PipelineError, "report")

    @property
    def fused(self) -> list[Decision]:
        """The chains that became kernels."""
        return [d for d in self.decisions if d.fused]

    @property
    def declined(self) -> list[Decision]:
        """The chains that were left alone, and of which no other kernel of ours took the result.

        Those with an operation among the `leftovers` are here, too, whoever took the rest.  All
        that a pass declined on the way is in `decisions`.
        """
        taken = {(d.function, name) for d in self.fused for name in d.names}
        left = {(x.function, x.where) for x in self.leftovers}
        lost = []
        for d in self.decisions:
            names = {(d.function, name) for name in d.names} - taken
            result = (d.function, d.where.rpartition(", ")[2])
            if not d.fused and (result in names or names & left):
                lost.append(d)
        return lost

    def work_of(self, function: str) -> list[Item]:
        """Return what one function multiplies."""
        return [item for item in self.work if item.function == function]

    @property
    def launches(self) -> list[Launches]:
        """What each function runs; empty where the pipeline did not come that far."""
        found, whole = [], self.material
        for graph in whole.after:
            kernels = tuple(node.op for node in graph.nodes if node.is_kernel)
            copies = tuple((node.op, node.copied) for node in graph.nodes if node.copied)
            if kernels:
                planned = (m.get(graph.function) for m in (whole.memory, whole.tvm_memory or {}))
                found.append(Launches(graph.function, kernels, copies, graph.symbols, *planned))
        return found

    @property
    def coverage(self) -> list[Coverage]:
        """What became of each function: chains found of those there are, launches, copies."""
        return coverage_of(self.decisions, self.leftovers, self.launches)

    @property
    def calls(self) -> list[Call]:
        """What one call of each function that runs fused kernels takes, at several sizes."""
        return calls_of(self) if self.recorded is None else self.recorded

    def to_json(self) -> str:
        """Return the report as JSON: an object whose parts are lists of objects.

        Infinities and NaN, which JSON does not have, are null.  ``device``, ``backend`` and
        ``model`` are texts.

        ``decisions``
            Every decision: the texts of `Decision`, ``fused``, and as far as there are such the
            fields of the ``workload`` with its ``key``, its statements (``graph``), the fields of
            each `TilePlan` with ``upper``, the last size that it serves (-1: all that are left),
            as ``plans``, ``predictions``, ``validation`` and ``decline``.  A
            prediction has ``upper``, the ``size`` that was priced, ``fused_s`` and ``unfused_s``
            in seconds, ``bound``, and ``measured_s`` of a tuning database.
        ``leftovers``, ``left_out``, ``rewrites``, ``joined``
            The fields of `Leftover`, of `LeftOut`, of `Rewrite` and of `Joining`.
        ``schedules``
            ``function``, ``rule`` (empty where none had a schedule), ``plans`` where it goes by
            ours, and ``refusals`` of the rules that were asked before.
        ``coverage``
            By function, and by chain how many are in fused kernels and how many there are;
            ``launches``, ``per_layer``, ``copies``, ``copied_bytes``, ``memory_bytes``,
            ``tvm_memory_bytes`` and the sizes at which they were counted (``symbols``), where the
            pipeline came that far.
        ``calls``
            What one call of each function with fused kernels takes at some ``sizes``, in seconds:
            its fused chains (``fused_s``), the least that other kernels take
            (``rest_s``, counted once, at ``symbols`` of ``coverage``), and of the chains
            ``unfused_s`` and ``floor_s``; null where it is not known.
        ``work``
            What each function multiplies: the fields of `Item`; sizes are numbers, or text in the
            names of symbolic sizes.  The decision with the same ``kernel`` has the workload.
        ``graphs``
            The bindings of each function ``before`` and ``after`` fusing.
        ``kernels``
            A hash of each PrimFunc's code, by its name.
        """
        return json_text(record_of(self))

    def text(self) -> str:
        """Return the device and tables: what was fused (equal kernels counted), what not, rules."""
        told = report_text(self)
        return f"for {self.device}\n\n{told}" if self.device else told
