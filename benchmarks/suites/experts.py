"""A layer of experts on an NVIDIA GPU, from the router to the sum: ours and its peers, in one run.

    python -m benchmarks run experts [--cases qwen3-30b] [--tokens 1 64] [--contenders grouped ours]

Random weights at the sizes of published models, bfloat16.  In torch a user has two ways, of which
the faster counts: `bmm` gathers the weights of each pair of token and expert, which pays for few;
`grouped` sorts pairs by expert and multiplies by `torch._grouped_mm`.  Each is timed as it is, and
under torch.compile.  SGLang's Triton kernels stand beside them where SGLang is installed
(benchmarks/suites/sglang_experts.py tells what of them is timed).  Nothing in them waits for the
host, so that everybody is a CUDA graph; L2 is flushed before each replay.  Results are compared
with float64 for some tokens.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import torch
from torch.nn.functional import linear, silu, softmax
from tvm import ir, relax
from tvm.relax import op

from benchmarks import building
from benchmarks.report import Entry, Verdict, ratio
from benchmarks.suite import Suite
from benchmarks.suites import sglang_experts
from relax_fusion.studio.bench.torch_peers import under_compile

DTYPE = "bfloat16"

BMM_PAIRS = 64
"""Pairs of token and expert up to which weights are gathered: beyond, a gather takes longer than
all of the rest."""

WORST, MEAN = 1.0, 1.2
"""How many times as fast as its best peer each layer is to be, and all by the geometric mean."""

LIMIT, SHARPNESS = 7.0, 1.702
"""Of the gate of gpt-oss."""

CHECKED = 16
"""Tokens whose results are compared."""


@dataclass(frozen=True)
class Model:
    """A layer: experts, those chosen, features, features between, and whether it is gpt-oss's.

    That has biases, weights ``[k, n]``, gate and up in turns, and a gate that is clipped.
    """

    experts: int
    chosen: int
    hidden: int
    between: int
    is_oss: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights."""
        up = (self.experts, 2 * self.between, self.hidden)
        down = (self.experts, self.hidden, self.between)
        found: dict[str, tuple[int, ...]] = {"router": (self.experts, self.hidden)}
        if not self.is_oss:
            return {**found, "up": up, "down": down}
        swapped = {"up": (up[0], up[2], up[1]), "down": (down[0], down[2], down[1])}
        return {**found, **swapped, "up_bias": up[:2], "down_bias": down[:2]}


MODELS = {
    "qwen3-30b": Model(128, 8, 2048, 768),
    "mixtral-8x7b": Model(8, 2, 4096, 14336),
    "gpt-oss-20b": Model(32, 4, 2880, 2880, is_oss=True),
}
"""Published sizes."""


@dataclass(frozen=True)
class Item:
    """A layer for a number of tokens, compiled for a target."""

    case: str
    tokens: int
    target: str

    @property
    def name(self) -> str:
        return f"{self.case}, {self.tokens} tokens"

    @property
    def model(self) -> Model:
        return MODELS[self.case]


# --- ours --------------------------------------------------------------------------------------


class _Builder:
    """Writes a layer as exporters do: weights are looked up by the expert of each pair."""

    def __init__(self, model: Model, tokens: int) -> None:
        self.model, self.tokens, self.blocks = model, tokens, relax.BlockBuilder()
        shapes = {"x": (tokens, model.hidden), **model.shapes()}
        self.params = {n: relax.Var(n, relax.TensorType(s, DTYPE)) for n, s in shapes.items()}

    def emit(self, value: relax.Expr) -> relax.Var:
        return self.blocks.emit(value)

    def module(self) -> ir.IRModule:
        with self.blocks.function("main", [*self.params.values()]):
            with self.blocks.dataflow():
                result = self.blocks.emit_output(self._layer())
            self.blocks.emit_func_output(result)
        return self.blocks.get()

    def _layer(self) -> relax.Expr:
        model, p, emit = self.model, self.params, self.emit
        pairs, chosen = self.tokens * model.chosen, model.chosen
        logits = emit(op.matmul(p["x"], op.permute_dims(p["router"])))
        logits = emit(op.astype(logits, "float32"))
        scores = logits if model.is_oss else emit(op.nn.softmax(logits, -1))
        best = emit(op.topk(scores, chosen, axis=-1, ret_type="both", dtype="int64"))
        values = emit(best[0])
        if model.is_oss:
            share = emit(op.nn.softmax(values, -1))
        else:
            share = emit(op.divide(values, op.sum(values, axis=[-1], keepdims=True)))
        share = emit(op.reshape(op.astype(share, DTYPE), [pairs, 1]))
        self.ids = emit(op.reshape(emit(best[1]), [pairs]))
        wide = op.broadcast_to(op.expand_dims(p["x"], 1), [self.tokens, chosen, model.hidden])
        y = self._linear(emit(op.reshape(wide, [pairs, model.hidden])), "up")
        y = self._linear(emit(self._gate(y)), "down")
        weighed = emit(op.multiply(y, share))
        wide = emit(op.reshape(weighed, [self.tokens, chosen, model.hidden]))
        return op.sum(wide, axis=[1])

    def _linear(self, rows: relax.Expr, name: str) -> relax.Var:
        weight = self.emit(op.take(self.params[name], self.ids, axis=0, mode="fast"))
        axis = 1 if self.model.is_oss else -1
        column = self.emit(op.expand_dims(rows, axis))
        operands = (column, weight) if self.model.is_oss else (weight, column)
        y = self.emit(op.squeeze(self.emit(op.matmul(*operands)), [axis]))
        if not self.model.is_oss:
            return y
        bias = self.emit(op.take(self.params[f"{name}_bias"], self.ids, axis=0, mode="fast"))
        return self.emit(op.add(y, bias))

    def _gate(self, y: relax.Expr) -> relax.Expr:
        width = 2 * self.model.between
        if not self.model.is_oss:
            halves = self.emit(op.split(y, 2, axis=-1))
            return op.multiply(self.emit(op.nn.silu(halves[0])), halves[1])
        gates, ups = (op.strided_slice(y, [1], [n], [width], [2]) for n in (0, 1))
        gates, ups = op.clip(gates, -3.4e38, LIMIT), op.clip(ups, -LIMIT, LIMIT)
        one, sharp = relax.const(1.0, DTYPE), relax.const(SHARPNESS, DTYPE)
        narrow = op.multiply(gates, op.sigmoid(op.multiply(gates, sharp)))
        return op.multiply(op.add(ups, one), narrow)


def build(item: Item) -> building.Built:
    """Return a compiled layer."""
    return building.compiled(_Builder(item.model, item.tokens).module(), item.target)


# --- torch -------------------------------------------------------------------------------------


def routed(model: Model, x: torch.Tensor, router: torch.Tensor) -> tuple[Any, Any]:
    """Return the shares and the experts of tokens."""
    logits = linear(x, router).float()
    if model.is_oss:
        values, ids = logits.topk(model.chosen, -1)
        return softmax(values, -1).to(x.dtype), ids
    values, ids = softmax(logits, -1).topk(model.chosen, -1)
    return (values / values.sum(-1, keepdim=True)).to(x.dtype), ids


def gated(model: Model, y: torch.Tensor) -> torch.Tensor:
    """Return the gate's result."""
    if not model.is_oss:
        gate, up = y.chunk(2, -1)
        return silu(gate) * up
    gate, up = y[..., ::2].clamp(max=LIMIT), y[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(SHARPNESS * gate))


def by_pair(model: Model, x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the layer by a gather of the weights of each pair."""
    share, ids = routed(model, x, w["router"])
    flat = ids.flatten()

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        if model.is_oss:
            return torch.bmm(rows[:, None], w[name][flat])[:, 0] + w[f"{name}_bias"][flat]
        return torch.bmm(w[name][flat], rows[:, :, None])[:, :, 0]

    rows = x.repeat_interleave(model.chosen, 0)
    y = product(gated(model, product(rows, "up")), "down")
    return (y.view(*ids.shape, -1) * share[..., None]).sum(1)


def by_groups(model: Model, x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the layer by matmuls of the rows of each expert."""
    share, ids = routed(model, x, w["router"])
    ordered, order = ids.flatten().sort(stable=True)
    every = torch.arange(model.experts, device=x.device)
    ends = torch.searchsorted(ordered, every, right=True).int()

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = w[name] if model.is_oss else w[name].transpose(1, 2)
        y = torch._grouped_mm(rows, weight, offs=ends)
        return y + w[f"{name}_bias"][ordered] if model.is_oss else y

    y = product(gated(model, product(x[order // model.chosen], "up")), "down")
    back = torch.empty_like(y)
    back[order] = y
    return (back.view(*ids.shape, -1) * share[..., None]).sum(1)


def by_sglang(model: Model, x: torch.Tensor, w: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """Return the layer by SGLang's kernels, without the router."""
    found = routed(model, x, w["router"])
    if not model.is_oss:
        return sglang_experts.layer(x, w, found, None)
    turned = {name: w[name].transpose(1, 2).contiguous() for name in ("up", "down")}
    gate = torch.compile(lambda y: gated(model, y), dynamic=False)
    return sglang_experts.layer(x, {**w, **turned}, found, gate)


# --- numbers -----------------------------------------------------------------------------------


def operands(item: Item, device: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return tokens and weights; experts are chosen at random, by logits that are well apart.

    So rounding moves no token to another expert.
    """
    model, seed = item.model, torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=seed, device=device, dtype=torch.bfloat16)

    weights = {name: normal(*shape) for name, shape in model.shapes().items()}
    for name in ("up", "down"):
        weights[name] *= (model.between if name == "down" else model.hidden) ** -0.5
    router = weights["router"].double()
    wanted = torch.rand(item.tokens, model.experts, generator=seed, device=device) - 4
    first = wanted.argsort(-1)[:, : model.chosen]
    steps = torch.arange(model.chosen, device=device) / 4.0
    wanted.scatter_(1, first, steps.expand(item.tokens, -1).contiguous())
    x = normal(item.tokens, model.hidden).double()
    back = torch.linalg.pinv(router)
    x = x + (wanted.double() - x @ router.T) @ back.T
    return x.bfloat16(), weights


def exact(item: Item, x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the results of some tokens in float64, expert by expert."""
    model, x = item.model, x[places(item, x.device)]
    share, ids = routed(model, x, w["router"])
    total = torch.zeros_like(x, dtype=torch.float64)
    for expert in ids.unique().tolist():
        up, down = w["up"][expert].double(), w["down"][expert].double()
        row, place = (ids == expert).nonzero(as_tuple=True)
        y = x[row].double() @ (up if model.is_oss else up.T)
        y = gated(model, y + w["up_bias"][expert].double() if model.is_oss else y)
        y = y @ (down if model.is_oss else down.T)
        y = y + w["down_bias"][expert].double() if model.is_oss else y
        total.index_add_(0, row, y * share[row, place, None].double())
    return total


def places(item: Item, device: Any) -> torch.Tensor:
    """Return the tokens whose results are compared."""
    count = min(item.tokens, CHECKED)
    return torch.linspace(0, item.tokens - 1, count, device=device).long()


class Experts(Suite):
    """Layers at fixed numbers of tokens; ours may err twice as much as torch."""

    name, device = "bench_experts", "gpu"
    key = ("case", "tokens")
    cases = tuple(MODELS)
    contenders = ("bmm", "grouped", "bmm compiled", "grouped compiled", "SGLang", "ours")
    usual = contenders
    head = ("layer", "tokens", *(f"{c}, us" for c in contenders), "plans", "ours vs best")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        tokens = [1, 8, 64, 512, 4096]
        parser.add_argument("--tokens", type=int, nargs="+", default=tokens, help="(1 to 4096)")

    def items(self) -> list[Item]:
        args = self.args
        return [Item(case, count, args.target) for case in args.cases for count in args.tokens]

    def facts(self, item: Item) -> Entry:
        return {"case": item.case, "tokens": item.tokens}

    def absent(self, item: Item) -> tuple[str, ...]:
        few = item.tokens * item.model.chosen <= BMM_PAIRS
        gone = () if few else ("bmm", "bmm compiled")
        return gone if sglang_experts.is_here() else (*gone, "SGLang")

    def prepare(self, items: Sequence[Item]) -> None:
        if "ours" in (self.args.contenders or self.usual):
            building.fill_cache(build, items)

    @torch.no_grad()
    def measured(self, item: Item) -> Entry:
        """Return microseconds and errors of a layer."""
        timing, model = self.session.timing, item.model
        x, weights = operands(item, timing.DEVICE)
        wanted, some = exact(item, x, weights), places(item, timing.DEVICE)
        ways = {"bmm": by_pair, "grouped": by_groups}
        first = by_pair(model, x[some], weights)
        allowed = timing.allowed_error(timing.error_of(first, wanted), DTYPE)
        kernels: list[str] = []

        def contender(name: str) -> Callable[[], Any]:
            if name == "ours":
                built = build(item)
                kernels.extend(told(built, item.tokens))
                return built.call("main", [x, *(weights[n] for n in model.shapes())])
            if name == "SGLang":
                return by_sglang(model, x, weights)
            way, _, compiled = name.partition(" ")
            if not compiled:
                return lambda: ways[way](model, x, weights)
            return under_compile(lambda: ways[way](model, x, weights), None, dynamic=False)

        errors: dict[str, float] = {}

        def check(name: str, call: Any) -> None:
            result = timing.as_torch(call.checked_result())[some]
            errors[name] = timing.error_of(result, wanted)

        calls, failed = self.session.captured(self.asked(item), contender, check)
        wrong = [name for name, error in errors.items() if not error <= allowed]
        found = {"failed": failed, "wrong": wrong, "errors": errors, "allowed": allowed}
        return {**found, **self.session.times(calls), "kernels": kernels}

    def intro(self, record: Entry) -> str:
        return f"{record['gpu']}, {DTYPE}; medians of CUDA graph replays, L2 flushed before each."

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        times = (f"{entry['us'][c]:.1f}" if c in entry["us"] else "" for c in self.contenders)
        against = best(entry)
        gain = "" if against is None else f"{against:.2f}"
        return entry["case"], str(entry["tokens"]), *times, ", ".join(entry["kernels"]), gain

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        found = best(entry)
        return [] if found is None else [(self.name_of(entry), "vs the best", WORST, found)]

    def verdicts(self, record: Entry) -> list[Verdict]:
        found = super().verdicts(record)
        ratios = [v[3] for v in found]
        return [*found, ("all", "mean vs the best", MEAN, geometric_mean(ratios))] if found else []


def best(entry: Entry) -> float | None:
    """Return how many times as fast ours is as the fastest peer."""
    peers = [name for name in Experts.contenders if name != "ours"]
    found = [r for name in peers if (r := ratio(entry, name)) is not None]
    return min(found, default=None)


def told(built: building.Built, tokens: int) -> list[str]:
    """Return the plans of what was fused."""
    found = []
    for decision in built.report.decisions:
        plan = decision.plans.plan_for(tokens) if decision.fused and decision.plans else None
        if plan is not None:
            found.append(f"{plan.family} {plan.block_m}x{plan.block_n}x{plan.block_k}")
    return found
