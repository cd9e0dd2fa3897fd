"""Random norms, movements, angles and readers around a rotation: the rewritten one means the same.

Both functions are evaluated by numpy in float64, kernels by their workloads, so that nothing is
compiled and a wrong rewrite shows as a difference in the first digits.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from relax_fusion import Decision
from relax_fusion.canonical import FuseNormRotation
from relax_fusion.equivalence.prim_funcs import computed
from relax_fusion.equivalence.sizes import Shrink
from relax_fusion.workload import NormMatmul, reference

from ..support.chain_reference import evaluate
from ..support.chains import Chain, module, run_pass
from ..support.rope_chains import MATMUL, cut, neighbours
from ..support.rope_chains import turn as turned_halves

WIDTH = 8
EPS = 2.0**-10  # float32 has it
PERMUTATIONS = {4: ([0, 2, 1, 3], [1, 0, 2, 3], [2, 0, 1, 3], [1, 2, 0, 3]), 3: ([1, 0, 2],)}


@dataclass
class Draft:
    """A function while it is drawn up."""

    dice: random.Random
    more: random.Random
    inputs: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    def chance(self, probability: float) -> bool:
        return self.dice.random() < probability

    def angles(self, name: str, shape: list[int], heads: int) -> tuple[str, str]:
        """Add cosines and sines that can be broadcast to `shape`, usually over axis `heads`."""
        kept = [self.chance(0.1 if axis == heads else 0.7) for axis in range(len(shape) - 1)]
        dims = [d if keep else 1 for d, keep in zip(shape, kept, strict=False)] + shape[-1:]
        if self.chance(0.5):
            dims = dims[dims.index(next((d for d in dims if d != 1), dims[-1])) :]
        for kind in "CS":
            self.inputs.append(f"{kind}{name}[{','.join(map(str, dims))}]")
        return f"C{name}", f"S{name}"


@dataclass
class Form:
    """How pairs are chosen, of how many features of a head, and what becomes of the parts of it.

    `norm` is what is normalised in front: each head, whole rows, or nothing.
    """

    pairing: str
    width: int
    end: str
    norm: str

    def gamma(self, draft: Draft, tag: str, width: int) -> str:
        """Add what normalised features are multiplied by, or take that of another part."""
        tag, plus = draft.more.choice([("", 0), ("", 1), ("", 0), (tag, 1), (tag, 0.5)])
        if f"g{tag}[{width}]" not in draft.inputs:
            draft.inputs.append(f"g{tag}[{width}]")
        return f'R.add(g{tag}, R.const({plus}, "float32"))' if plus else f"g{tag}"


def draw(seed: int) -> Chain:
    """Draw a matmul of which some heads are rotated behind movements."""
    draft = Draft(random.Random(seed), random.Random(-seed))
    dice = draft.dice
    rows, head = [dice.choice([1, 2, 3]), dice.choice([1, 4, 6])], dice.choice([2, 4, 6])
    parts = [dice.choice([1, 2, 3]) for _ in range(dice.choice([1, 1, 2, 3]))]
    if draft.chance(0.5):
        parts = parts[:1] * len(parts)
    turns = dice.choice([1, 1, 2])
    norm = draft.more.choice(["heads", "heads", "rows", "", "", ""])
    plain = norm and draft.more.random() < 0.8  # a norm of all features, of whole heads that turn
    parts, turns = (parts[:1], 1) if plain else (parts, turns)
    n = turns * sum(parts) * head
    draft.inputs += [f"x[{rows[0]},{rows[1]},{WIDTH}]", f"W[{WIDTH},{n}]"]
    draft.lines.append("m = R.matmul(x, W)")
    if draft.chance(0.15):
        draft.lines.append("z = R.exp(m)")
        draft.results.append("z")
    whole = "m" if turns == 1 else "w"
    if turns > 1:
        draft.lines.append(f"w = R.reshape(m, R.shape({[*rows, turns, n // turns]}))")
    names = [f"t{i}" for i in range(len(parts))] if len(parts) > 1 else [whole]
    if len(parts) > 1:
        ends = list(np.cumsum(parts)[:-1] * head)
        draft.lines.append(f"p = R.split({whole}, {[int(e) for e in ends]}, axis=-1)")
        draft.lines += [f"{name} = p[{i}]" for i, name in enumerate(names)]
    shared: dict[tuple[int, ...], tuple[str, str]] = {}
    pairing = dice.choice(["halves", "halves", "neighbours", "by_pair"])
    width = head if draft.chance(0.6) or plain else 2
    pairing = "neighbours" if plain and pairing == "by_pair" else pairing
    form = Form(pairing, width, dice.choice(["joined", "joined", "apart"]), norm)
    if norm == "rows":
        line = f"m = R.nn.rms_norm(u, {form.gamma(draft, '', n)}, axes=[-1], epsilon={EPS})"
        draft.lines = ["u = R.matmul(x, W)", line, *draft.lines[1:]]
    for i, (name, heads) in enumerate(zip(names, parts, strict=True)):
        part(draft, f"{i}", name, (rows, turns * heads, head), (form, shared))
    return Chain(f"seed{seed}", " ".join(draft.inputs), "\n".join(draft.lines), results(draft))


def results(draft: Draft) -> str:
    return f"({', '.join(draft.results)})" if len(draft.results) > 1 else draft.results[0]


def part(
    draft: Draft,
    tag: str,
    name: str,
    sizes: tuple[list[int], int, int],
    how: tuple[Form, dict[tuple[int, ...], tuple[str, str]]],
) -> None:
    """Move a part of the projection to heads, and rotate it or not."""
    rows, heads, head = sizes
    form, shared = how
    shape = [*rows, heads, head] if draft.chance(0.7) else [rows[0] * rows[1], heads, head]
    draft.lines.append(f"q{tag} = R.reshape({name}, R.shape({shape}))")
    moved, head_axis = f"q{tag}", len(shape) - 2
    if draft.chance(0.5):
        order = draft.dice.choice(PERMUTATIONS[len(shape)])
        draft.lines.append(f"r{tag} = R.permute_dims(q{tag}, {order})")
        moved, shape, head_axis = f"r{tag}", [shape[a] for a in order], order.index(head_axis)
    if draft.chance(0.25):
        draft.results.append(moved)
        return
    if form.norm == "heads":
        gamma = form.gamma(draft, tag, head)
        draft.lines.append(f"{moved}g = R.nn.rms_norm({moved}, {gamma}, axes=[-1], epsilon={EPS})")
        moved = f"{moved}g"
    turned, shape = (moved, shape) if form.width == head else (f"{moved}f", [*shape[:-1], 2])
    columns = form.width // 2 if form.pairing == "by_pair" else form.width
    found = shared.get(tuple(shape))
    if found is None or draft.chance(0.2):
        found = draft.angles(tag, [*shape[:-1], columns], head_axis)
        shared[tuple(shape)] = found
    if turned != moved:
        draft.lines.append(cut(moved, form.width, head, len(shape) - 1))
    rotate = {"halves": turn, "neighbours": neighbours, "by_pair": by_pair}[form.pairing]
    draft.lines.append(rotate(turned, *found, f"y{tag}", shape))
    if turned == moved or form.end == "apart":
        draft.results.append(f"y{tag}")
    else:
        draft.lines.append(f"z{tag} = R.concat((y{tag}, {moved}k), axis=-1)")
        draft.results.append(f"z{tag}")
    if draft.chance(0.15):
        draft.results.append(draft.dice.choice([moved, f"y{tag}h", f"y{tag}a"]))


def turn(source: str, cos: str, sin: str, end: str, shape: list[int]) -> str:
    """Return a rotation of halves."""
    return turned_halves(source, cos, sin, end, len(shape) - 1, shape[-1] // 2)


def by_pair(source: str, cos: str, sin: str, end: str, shape: list[int]) -> str:
    """Return a rotation of neighbours by an angle for each pair."""
    e, last = end, len(shape)
    return (
        f"{e}g = R.reshape({source}, R.shape({[*shape[:-1], shape[-1] // 2, 2]}))\n"
        f"{e}l = R.take({e}g, R.const(0), axis={last})\n"
        f"{e}h = R.take({e}g, R.const(1), axis={last})\n"
        f"{e}a = R.multiply({e}l, {cos})\n"
        f"{e}1 = R.subtract({e}a, R.multiply({e}h, {sin}))\n"
        f"{e}2 = R.add(R.multiply({e}l, {sin}), R.multiply({e}h, {cos}))\n"
        f"{e}j = R.concat((R.expand_dims({e}1, axis=[{last}]), "
        f"R.expand_dims({e}2, axis=[{last}])), axis=-1)\n"
        f"{e} = R.reshape({e}j, R.shape({shape}))\n"
    )


def kernel(work: NormMatmul) -> Callable[..., np.ndarray]:
    """Return what the kernel of a projection computes."""

    def run(*arrays: np.ndarray) -> np.ndarray:
        given = zip((o.name for o in work.graph.inputs), arrays, strict=True)
        return reference.evaluate(work.graph, dict(given))["out0"]

    return run


def rotated(decisions: list[Decision]) -> str:
    """Tell what the kernel of a projection does with heads."""
    outs = [d.workload.outputs[0] for d in decisions if d.fused]
    names = ("head_norm", "rope")
    return " ".join(name for name in names if any(getattr(out, name) for out in outs))


@pytest.fixture(
    scope="module",
    params=[range(100), pytest.param(range(100, 300), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def outcomes(request: pytest.FixtureRequest) -> dict[int, tuple[str, float]]:
    """Rewrite all functions in one go: what became of heads, and the largest difference."""
    chains = {seed: draw(seed) for seed in request.param}
    before = module(chains.values())
    after, decisions = run_pass(FuseNormRotation()(before), MATMUL)
    apart = {
        gvar.name_hint: lambda *arrays, func=func: computed(func, arrays, Shrink())
        for gvar, func in after.functions_items()
        if gvar.name_hint.startswith("rms_norm_rotation")
    }
    found = {}
    for seed, chain in chains.items():
        own = [d for d in decisions if d.function == chain.name]
        kernels = apart | {d.kernel: kernel(d.workload) for d in own if d.fused}
        inputs = chain.arrays()
        want = evaluate(before[chain.name], inputs)
        got = evaluate(after[chain.name], inputs, kernels)
        worst = max(float(np.abs(g - w).max()) for g, w in zip(got, want, strict=True))
        found[seed] = rotated(own), worst
    return found


def test_every_function_means_the_same(outcomes: dict[int, tuple[str, float]]) -> None:
    assert {seed: worst for seed, (_, worst) in outcomes.items() if worst > 1e-12} == {}


def test_all_outcomes_are_common(outcomes: dict[int, tuple[str, float]]) -> None:
    met = Counter(done for done, _ in outcomes.values())
    assert 0.27 < met[""] / len(outcomes) < 0.73
    assert met["head_norm rope"] / len(outcomes) > 0.04
