"""How much of a model is in fused kernels: what was left, chains found, launches, copies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from ..workload import Attention, Chain, ExpertMatmul, GatedFFN, NormMatmul, Step, Workload
from ..workload.operators import ACTIVATIONS
from ..workload.values import Op, parts
from .decision import Decision

Kind = Literal[
    "matmul",
    "norm",
    "softmax",
    "attention",
    "rope",
    "norm and rope",
    "activation",
    "convolution",
    "routing",
]

CHAINS = (
    *("projection", "norm -> projection", "projection -> activation", "rope", "attention"),
    "routing",
)
"""The chains that `Coverage` counts. A projection is a matmul with a weight. The second is a norm
that a projection reads, the third an activation of a projection's result, a gate's among them; only
moves of elements, casts and biases may stand between. The next are rotations, where those that one
kernel makes of one projection's result count once, and softmaxes between matmuls. A kernel of ours
that normalises heads and rotates them, apart from their projection's, is one of a rotation, too.
The last are choices of experts."""


IS_OFF = " is switched off"
"""A reason that is no more than the choice of who compiled ends like this, behind the pass's
name."""


_KEYS = re.compile(r"_[0-9a-f]{8}_.*|_reshape\d*|\d+(?=_|$)")
"""Keys of workloads and plans, running numbers and reshapes in a kernel's name."""


@dataclass(frozen=True)
class Leftover:
    """An operation that transformers are made of, and that no kernel of a chain computes."""

    function: str
    where: str
    """The Relax function, and the variable that the operation defines."""
    kind: Kind
    """What it is; "attention" is the operator, "routing" a choice of the largest, as of experts,
    "norm and rope" one kernel of ours, which is apart from that of the heads' projection."""
    reason: str
    """Why it was left: the refusal of a pass, or what stands around it."""
    chain: str = ""
    """The member of `CHAINS` that it would have been part of; empty if it is of none."""


@dataclass(frozen=True)
class Launches:
    """The kernels that one call of a function runs."""

    function: str
    """The Relax function."""
    kernels: tuple[str, ...]
    """Their names in the order of the calls.  Both branches of a condition are there, and what
    other functions of the module run when they are called is not."""
    copies: tuple[tuple[str, int], ...] = ()
    """Those that only move or cast elements, with the bytes that they read and write.  Lookups of a
    matrix's rows, as embeddings are, updates in place and views are none of them."""
    symbols: tuple[tuple[str, int], ...] = ()
    """The values of symbolic sizes for which bytes were counted."""
    memory: int | None = None
    tvm_memory: int | None = None
    """Bytes of all that it computes, where results that are read no more lend theirs to others; and
    what TVM's default pipeline would take.  None where it is not known."""


@dataclass(frozen=True)
class Coverage:
    """What became of one function."""

    function: str
    chains: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For members of `CHAINS`: how many are in kernels of ours, of how many there are."""
    launches: Launches | None = None
    """What it runs; None where the pipeline did not come that far."""

    @property
    def per_layer(self) -> int | None:
        """Launches of a layer, see `layer_length`; None where nothing repeats."""
        return layer_length(self.launches.kernels) if self.launches is not None else None

    @property
    def copied(self) -> int:
        """Bytes that kernels read and write which only copy."""
        return sum(size for _, size in self.launches.copies) if self.launches is not None else 0


@lru_cache(maxsize=64)
def layer_length(kernels: tuple[str, ...]) -> int | None:
    """Return after how many kernels a sequence of them repeats itself.

    It is the distance at which the longest run of kernels comes again.  Kernels count as the same
    when the pass that made them, or the operators in them, are.  First and last layers may differ
    a little from the others: a run need not be a whole layer, but has to be longer than half of
    one.  Whole layers may have their kernels in another order, as parallel branches do.

    Examples
    --------
    >>> layer_length(("take", "norm", "ffn", "norm", "ffn", "head"))
    2
    >>> layer_length(("take", "qkv", "attention", "ffn", "ffn", "qkv", "attention", "head"))
    3
    """
    best = (0, 0)
    names = [_KEYS.sub("", kernel) for kernel in kernels]
    for distance in range(1, len(names)):
        run = 0
        for one, other in zip(names, names[distance:], strict=False):
            run = run + 1 if one == other else 0
            if 2 * run > distance:
                best = max(best, (run, -distance))
        layers = [sorted(names[i : i + distance]) for i in range(len(names) - distance + 1)]
        runs = [0] * len(layers)
        for i, layer in enumerate(layers[distance:], distance):
            if layer == layers[i - distance]:
                runs[i] = runs[i - distance] + distance
        best = max(best, (max(runs), -distance))
    return -best[1] or None


def coverage_of(
    decisions: Iterable[Decision], leftovers: Iterable[Leftover], launches: Iterable[Launches]
) -> list[Coverage]:
    """Put together what is known of each function, in the order in which they were met."""
    found: dict[str, Counter[str]] = {}
    left: dict[str, Counter[str]] = {}
    calls = {run.function: run for run in launches}
    for decision in decisions:
        work = decision.workload
        if decision.fused:
            what = Counter(routing=1) if work is None else _chains_of(work)
            found.setdefault(decision.function, Counter()).update(what)
    for leftover in leftovers:
        counts = found if leftover.kind == "norm and rope" else left  # the first are ours
        counts.setdefault(leftover.function, Counter())[leftover.chain] += 1
    coverage = []
    for name in dict.fromkeys([*calls, *found, *left]):
        ours, others = found.get(name, Counter()), left.get(name, Counter())
        chains = {c: (ours[c], ours[c] + others[c]) for c in CHAINS if ours[c] + others[c]}
        if chains or name in calls:
            coverage.append(Coverage(name, chains, calls.get(name)))
    return coverage


def _normalises(work: NormMatmul | GatedFFN) -> int:
    """Return 1 if a kernel multiplies the rows of a norm, else 0."""
    return int(work.norm is not None and work.norm.kind != "none")


def _chains_of(work: Workload) -> Counter[str]:
    """Count what one kernel computes."""
    if isinstance(work, Attention):
        return Counter(attention=1)
    if isinstance(work, NormMatmul):
        steps: list[Step] = [step for out in work.outputs for step in out.epilogue]
        projections, norms = len(work.outputs), _normalises(work)
        ropes = sum(out.rope is not None for out in work.outputs)
    elif isinstance(work, GatedFFN):
        steps, ropes = [work.activation], 0
        projections, norms = 1 if work.merged else 2, _normalises(work)
    elif isinstance(work, ExpertMatmul):
        steps = [work.activation if work.gate is None else work.gate.activation]
        projections, norms, ropes = 1, 0, 0
    elif isinstance(work, Chain):
        values = [part for block in work.graph.blocks for part in parts(block.value)]
        steps, ropes = [part.name for part in values if isinstance(part, Op)], 0
        projections, norms = len(work.contractions), work.normed
    else:
        steps, ropes = [*work.inner, *work.outer], 0
        projections, norms = 2, 0
    return Counter(
        {
            "projection": projections,
            "norm -> projection": norms,
            "projection -> activation": sum(step in ACTIVATIONS for step in steps),
            "rope": ropes,
        }
    )
