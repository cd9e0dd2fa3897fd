"""Generated Triton kernels, run in the interpreter or on a GPU, and what they should give."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from relax_fusion.errors import TilingError
from relax_fusion.estimator.families.generated.memory import narrow_behind
from relax_fusion.estimator.families.generated.plan import (
    MANY,
    GeneratedPlan,
    Launched,
    launches,
    loop_sizes,
)
from relax_fusion.tiling import (
    Expression,
    Schedule,
    Structure,
    expressions,
    iteration_space,
    split_loops,
    split_sum,
)
from relax_fusion.tiling.placement import distinct
from relax_fusion.workload import Chain
from relax_fusion.workload.graph import Graph, Tensor
from relax_fusion.workload.reference import evaluate, numpy_dtype
from relax_fusion.workload.roofline import size_at

from ..tiling.graphs import chain, norm_mlp, projected_keys, random_graph, softmax
from .strange_graphs import KINDS

Arrays = Mapping[str, np.ndarray]

ALLOWED = {"bfloat16": 5e-2, "float16": 2e-2, "float32": 1e-4}
"""Of the largest value: a chain of half precision rounds what is between."""

DYNAMIC = {"kv_capacity": 50}
"""Sizes of dynamic dimensions; of others, `ROWS`."""

ROWS = 20

MOST_LOOPS, ORDERS = 4, 200
"""Loops of which all expressions are made, and orders that are drawn of more: of five, there are
thousands."""

SMALLEST = 2.0**-126
"""Of float32: processors may make 0 of what is smaller."""

WARPS = 4
"""Of a block that Triton is not told the warps of."""


def _patch_products() -> None:
    """Let the interpreter multiply bfloat16, which it holds as the integers of its bits."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    product = InterpreterBuilder.create_dot
    if getattr(product, "patched", False):
        return

    def known(tile: Any) -> Any:
        if tile.dtype.scalar != bfloat16:
            return tile
        bits = tile.data.view(np.uint16).astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), float32)

    def create_dot(self: Any, left: Any, right: Any, *more: Any) -> Any:
        return product(self, known(left), known(right), *more)

    create_dot.patched = True
    InterpreterBuilder.create_dot = create_dot


def launch(
    graph: Graph,
    schedule: Schedule,
    given: Mapping[str, Any],
    device: str = "cpu",
    sizes: Mapping[str, int] | None = None,
    blocks: int | None = None,
    **means: bool,
) -> Arrays:
    """Run a schedule, and return what it makes in float64.

    Parameters
    ----------
    sizes : mapping of str to int, optional
        Those of dynamic dimensions.
    blocks : int, optional
        Of the grid; by default those of the schedule, which is made for these sizes.
    """
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    from relax_fusion.triton_bridge.generated import Means, function_of, kernel_text

    if device == "cpu":
        _patch_products()
    sizes = sizes or {}
    some = {name: max(1, size) if blocks is None else MANY for name, size in sizes.items()}
    kernel = kernel_text(graph, schedule, some, Means(**means))
    held: dict[str, Any] = {}
    for parameter in kernel.operands:
        tensor, dtype = graph[parameter.tensor], getattr(torch, graph[parameter.tensor].dtype)
        if tensor.name in given:
            values = np.asarray(given[tensor.name]).astype("float64")
            held[tensor.name] = torch.from_numpy(values).to(device, dtype)
        else:
            shape = [size_at(d, sizes) for d in tensor.shape]
            nothing = float("nan") if dtype.is_floating_point else 77
            held[tensor.name] = torch.full(shape, nothing, dtype=dtype, device=device)
    arguments: list[Any] = [
        TensorDescriptor.from_tensor(held[p.tensor], list(p.box)) if p.box else held[p.tensor]
        for p in kernel.operands
    ]
    arguments += [sizes[name] for name in kernel.sizes]
    function_of(kernel)[(schedule.blocks if blocks is None else blocks,)](*arguments)
    return {o.name: held[o.name].double().cpu().numpy() for o in graph.outputs}


def check_plan(work: Chain, plan: GeneratedPlan, sizes: Mapping[str, int]) -> str:
    """Run the launches of a plan, as the pipeline does; return what is wrong, or nothing.

    Parameters
    ----------
    sizes : mapping of str to int
        Those of the dynamic dimensions; the kernels are made for any.
    """
    graph, draw = work.graph, np.random.default_rng(1)
    given = {}
    for operand in graph.inputs:
        values = draw.standard_normal([size_at(d, sizes) for d in operand.shape or ()]) / 2
        given[operand.name] = values.astype(numpy_dtype(operand.dtype)).astype("float64")
    held = dict(given)
    for launched in launches(graph, plan):
        schedule = launched.schedule
        extents = loop_sizes(launched.graph, tuple(sizes.items()))
        blocks = math.prod(-(-extents[n] // schedule.tile[n]) for n in schedule.structure.grid)
        how = {"blocks": blocks, "tensor_maps": bool(plan.tensor_maps)}
        held |= launch(launched.graph, schedule, held, "cpu", sizes, **how)
    return wrong(graph, held, given)


def small_schedule(graph: Graph, sizes: Mapping[str, int]) -> Schedule:
    """Return a schedule of small tiles.

    Raises
    ------
    TilingError
        If there is none that Triton can do.
    """
    space = iteration_space(graph, sizes)
    tile = {a.name: 1 if a.batch else min(a.size, 16) for a in space.loops}
    single = [a.name for a in space.loops if not a.batch and tile[a.name] == a.size]
    found = (s for s in distinct(space, expressions(space), single) if not s.kept)
    structure = next(found, None)
    if structure is None:
        raise TilingError("each structure keeps tiles for all iterations of a loop")
    return Schedule(space, structure, tuple(tile[a.name] for a in space.loops))


def draw_graph(choose: random.Random) -> Graph:
    """Draw a chain whose sizes no tile divides."""
    size = choose.randint
    kinds = (
        lambda: chain(size(1, 70), *(8 * size(1, 9) for _ in range(3)), batch=size(0, 1) * 2),
        lambda: chain(size(1, 40), *(size(8, 40) for _ in range(4))),
        lambda: softmax(size(1, 70), size(8, 100), choose.random() < 0.5),
        lambda: norm_mlp(size(1, 40), 40 + size(0, 30), size(8, 60), size(1, 40)),
        lambda: projected_keys(size(1, 40), size(8, 70)),
        lambda: random_graph(choose),
    )
    return choose.choice(kinds)()


def sizes_of(graph: Graph) -> dict[str, int]:
    """Return sizes of the dynamic dimensions of a graph that is drawn."""
    return {name: DYNAMIC.get(name, ROWS) for name in graph.dims}


def draw_schedule(
    graph: Graph, choose: random.Random, sides: tuple[int, ...], sizes: Mapping[str, int]
) -> Schedule | None:
    """Draw tiles, and a structure that Triton can do; None where there is none."""
    space = iteration_space(graph, sizes)
    tile = {
        a.name: 1 if a.batch else choose.choice([t for t in (*sides, a.size) if t <= a.size])
        for a in space.loops
    }
    single = [a.name for a in space.loops if not a.batch and tile[a.name] == a.size]
    some: Iterable[Expression] = (
        Expression(tuple(choose.sample(space.ordered, len(space.ordered)))) for _ in range(ORDERS)
    )
    if len(space.ordered) <= MOST_LOOPS:
        some = expressions(space)
    found: list[Structure] = [s for s in distinct(space, some, single) if not s.kept]
    if not found:
        return None
    return Schedule(space, choose.choice(found), tuple(tile[a.name] for a in space.loops))


def draw_values(graph: Graph, seed: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Draw operands, as their dtypes round them, and the sizes that are operands."""
    draw = np.random.default_rng(seed)
    given: dict[str, Any] = {
        slot.name: size_at(slot.dim, sizes) for slot in graph.slots if slot.dim is not None
    }
    for operand in graph.inputs:
        if operand.shape is not None:
            values = draw.standard_normal([size_at(d, sizes) for d in operand.shape])
            given[operand.name] = _stored(np.asarray(values), operand.dtype)
    return given


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return normal numbers as elements of a dtype, which are large where it is of integers."""
    if dtype == "bool":
        return (values > 0).astype("float64")
    if dtype.startswith(("int", "uint")):
        values = np.round(values * (30_000 if dtype == "int32" else 30))
        values = np.abs(values) if dtype.startswith("uint") else values
    return values.astype(numpy_dtype(dtype)).astype("float64")


def _as_stored(values: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Round what every kernel rounds; make infinite or 0 what the dtype does not hold."""
    with np.errstate(over="ignore"):
        stored = values.astype(numpy_dtype(tensor.dtype)).astype(values.dtype)
    if tensor.rounds:
        return stored
    values = np.where(np.abs(values) < SMALLEST, 0, values)
    return np.where(np.isfinite(stored) & (stored != 0), values, stored)


def wrong(graph: Graph, found: Arrays, given: Mapping[str, Any]) -> str:
    """Return what is wrong with results; empty where nothing is."""
    dtypes = {t.dtype for t in graph.tensors}
    halves = dtypes & {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
    allowed = (
        ALLOWED["bfloat16"]
        if halves
        else max((ALLOWED[d] for d in dtypes & {*ALLOWED}), default=1e-4)
    )
    for name, exact in evaluate(graph, given, "float32", rounding=_as_stored).items():
        finite = np.isfinite(exact)
        for kind in (np.isnan, np.isposinf, np.isneginf):
            if (kind(found[name]) != kind(exact)).any():
                return f"{name} is not finite where it should be, or is where it should not"
        most = np.abs(exact[finite]).max(initial=0.0)
        error = np.abs(found[name][finite] - exact[finite]).max(initial=0.0)
        if error > allowed * most:
            return f"{name} errs by {error} of {most}"
    return ""


def check(
    seeds: list[int], sides: tuple[int, ...], device: str = "cpu", kind: str = ""
) -> dict[str, Any]:
    """Run random graphs under random schedules, some split, some with tensor maps.

    Parameters
    ----------
    seeds : list of int
        One a graph.
    sides : tuple of int
        Tiles, beside those of a whole axis.
    device : {"cpu", "cuda"}
        Where: "cpu" is the interpreter.
    kind : str
        Which of the strange graphs, by name; empty: chains.

    Returns
    -------
    dict
        ``"wrong"``: what was, with the seed; ``"run"``, ``"split"``: how many; ``"refused"``: why.
    """
    said: dict[str, Any] = {"wrong": [], "run": 0, "split": 0, "refused": {}}
    for seed in seeds:
        choose = random.Random(seed)
        graph = KINDS[kind](choose) if kind else draw_graph(choose)
        sizes = sizes_of(graph)
        given = draw_values(graph, seed, sizes)
        loops = [n for n in split_loops(graph, sizes) if seed % 2]
        size = {a.name: a.size for a in iteration_space(graph, sizes).loops}
        counts = [(n, c) for n in loops for c in range(2, 17) if size[n] % c == 0]
        maps = choose.random() < 0.5
        try:
            if counts:
                two = split_sum(graph, *choose.choice(counts), sizes)
                steps = [two.partial, two.merging]
            else:
                steps = [graph]
            held = dict(given)
            for step in steps:
                schedule = draw_schedule(step, choose, sides, sizes)
                if schedule is None:
                    raise TilingError("no structure")
                if device == "cuda" and narrow_behind(Launched(step, schedule, WARPS, 1)):
                    raise TilingError("a narrow product behind another, which no plan has")
                inputs = {o.name: held[o.name] for o in step.inputs}
                held |= launch(step, schedule, inputs, device, sizes, tensor_maps=maps)
        except TilingError as err:
            said["refused"][seed] = str(err)
            continue
        said["run"] += 1
        said["split"] += len(steps) == 2
        mistake = wrong(graph, held, given)
        if mistake:
            said["wrong"].append(f"seed {seed}: {mistake}\n{graph}\n{schedule}")
    return said
