"""The estimator's plans of matmuls by experts against measurement on an NVIDIA GPU.

    python -m benchmarks judge experts --tokens 8 64 --cases qwen3-30b

Every plan of both products of a layer is timed at each number of tokens, L2 flushed before each
replay.  Results are compared with one another.
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from benchmarks import building
from benchmarks.judge.judgement import spearman
from benchmarks.report import Entry, plan_words
from benchmarks.suite import Suite, done
from benchmarks.suites.experts import DTYPE, LIMIT, MODELS, SHARPNESS, Item, operands, routed
from relax_fusion.errors import Decline
from relax_fusion.estimator import candidates, choose, predict
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.tuning.device import compiled
from relax_fusion.workload import DynamicDim, ExpertMatmul, Gate

PARTS = ("up", "down")

FEW_TOKENS = 512
"""Kernels for so many tokens are apart from those for more: they begin early."""

PAIRED = 16
"""Pairs of token and expert for each expert, beyond which they are not gone through one by one."""


@dataclass(frozen=True)
class Product:
    """One product of a layer, for few tokens or for any number."""

    case: str
    part: str
    few: bool
    target: str

    @property
    def name(self) -> str:
        return f"{self.case} {self.part}"

    def work(self) -> ExpertMatmul:
        """Return what the pass makes of it."""
        model, up = MODELS[self.case], self.part == "up"
        narrow = {"sharpness": SHARPNESS, "up_bounds": (-LIMIT, LIMIT), "offset": 1.0}
        clipped = Gate(interleaved=True, gate_bounds=(-3e38, LIMIT), **narrow)
        return ExpertMatmul(
            DynamicDim("rows", FEW_TOKENS if self.few else None),
            model.experts,
            model.chosen,
            *((model.hidden, model.between) if up else (model.between, model.hidden)),
            "kn" if model.is_oss else "nk",
            DTYPE,
            DTYPE,
            each=not up,
            bias=model.is_oss,
            gate=(clipped if model.is_oss else Gate()) if up else None,
            share="" if up else DTYPE,
        )


@cache
def built(product: Product) -> tuple[dict[TilePlan, tuple[building.Built, str]], dict[Any, str]]:
    """Return a function for each plan, and why others do not compile."""
    work, target = product.work(), make_target(product.target)
    plans = dict.fromkeys(candidates(work, device_of(target)))
    made, failed = compiled(work, {plan: PlanTable.single(plan) for plan in plans}, target)
    loaded = [(building.Built(each, building.Report()), names) for each, names in made]
    return {plan: (b, name) for b, names in loaded for plan, name in names.items()}, failed


class JudgeExperts(Suite):
    """Products of layers, at numbers of tokens."""

    name, device = "judge_experts", "gpu"
    key = ("case", "part", "tokens")
    cases = tuple(MODELS)
    head = ("product", "tokens", "best, us", "plan", "chosen, us", "plan", "regret", "correlation")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 4096])
        parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)

    def items(self) -> list[tuple[str, str, int]]:
        args = self.args
        return [(c, p, n) for n in args.tokens for c in args.cases for p in args.parts]

    def prepare(self, items: Sequence[tuple[str, str, int]]) -> None:
        building.fill_cache(built, dict.fromkeys(map(self._product, items)))

    def _product(self, item: tuple[str, str, int]) -> Product:
        case, part, tokens = item
        return Product(case, part, tokens <= FEW_TOKENS, self.args.target)

    @torch.no_grad()
    def measured(self, item: tuple[str, str, int]) -> Entry:
        """Check and time the plans of a product."""
        case, _, tokens = item
        timing, product = self.session.timing, self._product(item)
        work, model = product.work(), MODELS[case]
        functions, failed = built(product)
        tensors, results = self._tensors(item), dict[TilePlan, torch.Tensor]()
        many = tokens * model.chosen > PAIRED * model.experts
        wanted = [p for p in functions if not (many and p.family == "expert_pairs")]

        def contender(plan: TilePlan) -> Callable[[], Any]:
            module, name = functions[plan]
            return module.call(name, tensors)

        def check(plan: TilePlan, call: Any) -> None:
            results[plan] = timing.as_torch(call.checked_result()).float()

        calls, lost = self.session.captured(wanted, contender, check)
        some = torch.stack([r.flatten()[: 1 << 16] for r in results.values()]).double()
        middle = some.median(0).values
        errors = {p: timing.error_of(e, middle) for p, e in zip(results, some, strict=True)}
        wrong = [
            p for p, error in errors.items() if not error <= 8 * torch.finfo(torch.bfloat16).eps
        ]
        samples = self.session.sampler.sample_ms(
            {p: calls[p].launch for p in calls if p not in wrong}
        )
        us = {plan: 1e3 * statistics.median(s) for plan, s in samples.items()}
        chosen, dev = self._chosen(work, tokens), device_of(make_target(self.args.target))
        predicted = {plan: 1e6 * predict(work, plan, dev, tokens).seconds for plan in us}
        return {
            "plans": [{**p.to_attr(), "us": us[p], "predicted_us": predicted[p]} for p in us],
            "best": plan_words(min(us, key=us.__getitem__)),
            "best_us": min(us.values()),
            "chosen": plan_words(chosen),
            "chosen_us": us.get(chosen),
            "correlation": spearman(list(predicted.values()), list(us.values())),
            "failed": {plan_words(p): why for p, why in {**failed, **lost}.items()},
            "wrong": [plan_words(p) for p in wrong],
        }

    def _tensors(self, item: tuple[str, str, int]) -> list[torch.Tensor]:
        """Return the operands in the order of the workload."""
        case, part, tokens = item
        model = MODELS[case]
        x, w = operands(Item(case, tokens, self.args.target), self.session.timing.DEVICE)
        share, ids = routed(model, x, w["router"])
        weight = w[part].flatten(0, 1)
        bias = [w[f"{part}_bias"]] if model.is_oss else []
        if part == "up":
            return [x, ids, weight, *bias]
        h = torch.randn(tokens, model.chosen, model.between, device=x.device, dtype=x.dtype)
        return [h, ids, weight, *bias, share]

    def _chosen(self, work: ExpertMatmul, tokens: int) -> TilePlan:
        found = choose(work, device_of(make_target(self.args.target)), always=True)
        if isinstance(found, Decline):
            raise ValueError(f"the estimator declines: {found.detail}")
        return found.plans.plan_for(tokens)

    def is_bad(self, entry: Entry) -> bool:
        return "error" in entry or bool(entry["wrong"] or entry["failed"])

    def is_complete(self, entry: Entry, item: Any) -> bool:
        return bool(entry.get("plans"))

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        best, chosen = entry["best_us"], entry["chosen_us"]
        told = ("", "") if chosen is None else (f"{chosen:.1f}", f"{chosen / best - 1:.1%}")
        return (
            f"{entry['case']} {entry['part']}",
            str(entry["tokens"]),
            *(f"{best:.1f}", entry["best"], told[0], entry["chosen"], told[1]),
            f"{entry['correlation']:.2f}",
        )

    def summary(self, record: Entry) -> str:
        lost = [e["chosen_us"] / e["best_us"] - 1 for e in done(record) if e["chosen_us"]]
        mean = statistics.fmean(lost) if lost else 0.0
        return f"- {len(lost)} products: regret mean {mean:.1%}, largest {max(lost, default=0):.1%}"
