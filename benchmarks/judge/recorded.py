"""Recorded times of plans of matmul kernels on an NVIDIA H200: all that the repository keeps."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.judge.judgement import plan_of
from benchmarks.report import plan_words
from benchmarks.suites.matmul.cases import Chain
from benchmarks.suites.matmul.subject import ChainAt
from relax_fusion.estimator import Offer, Problem, candidates, violations
from relax_fusion.estimator.families.cuda_matmul.tiles import CudaPlan
from relax_fusion.estimator.families.few_rows.tiles import normalises
from relax_fusion.estimator.family import Option
from relax_fusion.estimator.prediction import next_power
from relax_fusion.estimator.registry import FAMILIES
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import DeviceSpec
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload import DynamicDim, GatedFFN, Norm, NormMatmul, Packed, Projection

ROOT = Path(__file__).parents[2]
DATA, LOGS = ROOT / "tests" / "data", ROOT / "docs" / "experiments"
FAMILY = {type(family).__name__: family for family in FAMILIES}
ROWS, RMS, RESIDUAL = DynamicDim("rows"), Norm("rms", 1e-5), ("residual",)

LLAMA = {"1b": (2048, 3072, 8192), "8b": (4096, 6144, 14336), "70b": (8192, 10240, 28672)}
"""Of LLaMA's layers: hidden, queries with keys and values, and between the matmuls of its FFN."""

Work = NormMatmul | GatedFFN


class Recorded(NamedTuple):
    """The time of a plan, median of replays of a CUDA graph with a cold L2, launch included.

    Parameters
    ----------
    source, group : str
        Where it is recorded, and what was timed with it in one run: plans of one workload at one
        number of rows.
    family : KernelFamily
        The plan's.
    work : NormMatmul or GatedFFN
        The workload.
    plan : TilePlan
        The plan.
    rows : int
        The rows.
    us : float
        Microseconds.
    """

    source: str
    group: str
    family: Any
    work: Work
    plan: TilePlan
    rows: int
    us: float

    @property
    def kind(self) -> str:
        """The family, by whose rates it is priced."""
        own = self.plan.family
        return f"{own} packed" if _is_packed(self.work) else own


def _is_packed(work: Work) -> bool:
    return (work.packed if isinstance(work, GatedFFN) else work.outputs[0].packed) is not None


@cache
def h200() -> DeviceSpec:
    """Return the device."""
    return device_of(make_target("h200"))


def matmul(k: int, n: int, norm: Norm | None = None, steps: tuple[str, ...] = ()) -> NormMatmul:
    """Return a matmul of symbolic rows."""
    return NormMatmul(ROWS, k, (Projection(n, "nk", steps),), norm, "float16", "float16")


def gated(k: int, n: int, norm: Norm | None = None) -> GatedFFN:
    """Return gated projections of symbolic rows."""
    return GatedFFN(ROWS, k, n, "nk", True, True, "silu", norm, "float16", "float16")


def llama(size: str, case: str) -> Work:
    """Return a chain of a layer of LLaMA."""
    hidden, qkv, wide = LLAMA[size]
    return {
        "qkv": matmul(hidden, qkv, RMS),
        "gate_up": gated(hidden, wide, RMS),
        "out": matmul(hidden, hidden, None, RESIDUAL),
        "down": matmul(wide, hidden, None, RESIDUAL),
    }[case]


@cache
def records() -> tuple[Recorded, ...]:
    """Return all times of plans that can run, one for each plan of a group."""
    found: dict[Any, list[Recorded]] = defaultdict(list)
    for read in (_families, _triton, _dots, _cuda, _mma, _few_rows, _packed_rows):
        for each in read():
            key = each.source, each.group, type(each.family), each.plan
            found[key].append(each)
    medians = (
        some[0]._replace(us=statistics.median(e.us for e in some)) for some in found.values()
    )
    return tuple(e for e in medians if _is_offered(e))


def _is_offered(each: Recorded) -> bool:
    """Tell whether a plan can run, and is looked at for so many rows."""
    if violations(each.plan, each.work, h200()):
        return False
    offers = _offers(each.family, each.work)
    alike = each.plan.family, each.plan.block_m
    offer = offers.get(each.plan) or offers.get(alike) or Offer(each.plan)
    option = Option(each.family, Problem(each.work, h200()), offer)
    return each.source == "families" or option.is_worth(each.rows, next_power(each.rows))


@cache
def _offers(family: Any, work: Work) -> dict[Any, Offer]:
    """Return what a family offers, by its plans, and for others by the rows of their tiles."""
    every = list(family.plans(Problem(work, h200())))
    alike = {(offer.plan.family, offer.plan.block_m): offer for offer in every}
    return {**alike, **{offer.plan: offer for offer in every}}


def _plans_of(family: Any, work: Work) -> list[TilePlan]:
    return [offer.plan for offer in family.plans(Problem(work, h200()))]


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _families() -> Iterator[Recorded]:
    """Yield the best plan of each family by its price of then, all in one run."""
    for name, families in _json(DATA / "2026-11-28-families.json")["chains"].items():
        model, case = name.split()
        work = ChainAt(Chain(case, model, ""), 1, "float16").work(symbolic=True)
        for own, plans in families.items():
            family, kind = FAMILY[own.split()[0]], own.split()[-1]
            if kind != own and kind not in family.names:
                continue  # a kernel that is no longer there
            for fields, times in plans:
                plan = family.plan(**{"family": family.names[0], **fields})
                for rows, us in times.items():
                    yield Recorded("families", f"{name} {rows}", family, work, plan, int(rows), us)


def _triton() -> Iterator[Recorded]:
    """Yield samples of all plans of Triton's kernels for layers of LLaMA."""
    for kind in ("", "-one_row", "-held_out", "-wide"):
        for group in _json(DATA / f"2026-11-21-judge_estimator{kind}.json")["groups"]:
            size, case, rows = group["size"], group["case"], group["rows"]
            for plan, ms in _plans(group["plans"]):
                name, work = f"{size} {case} {rows}", llama(size, case)
                yield Recorded(
                    f"triton{kind}", name, FAMILY["TritonMatmul"], work, plan, rows, 1e3 * ms
                )


def _plans(times: dict[str, float]) -> Iterator[tuple[TilePlan, float]]:
    """Yield the plans of families that there still are, with their times."""
    for words, time in times.items():
        if words.split()[0] in FAMILY["TritonMatmul"].names:
            yield plan_of(words), time


def _dots() -> Iterator[Recorded]:
    """Yield plans for one row of 43 shapes."""
    for group in _json(DATA / "2026-11-28-dot_products.json")["groups"]:
        name, work = group["name"], dots_work(group)
        for plan, us in _plans(group["us"]):
            yield Recorded("dots", name, FAMILY["TritonMatmul"], work, plan, 1, us)
        few, tir = group.get("few_rows_us", {}), group.get("tir_us", {})
        for plan in candidates(work, h200(), "tir") if few or tir else ():
            words, dots = plan_words(plan), FAMILY["DotProducts"]
            as_then = words.replace(dots.names[0], "tir")
            if f"{words} reg_m={plan.reg_m}" in few:
                us = few[f"{words} reg_m={plan.reg_m}"]
                yield Recorded("dots", name, FAMILY["FewRows"], work, plan, 1, us)
            elif plan.family in dots.names and as_then in tir:
                yield Recorded("dots", name, dots, work, plan, 1, tir[as_then])


def dots_work(group: dict[str, Any]) -> Work:
    """Return the workload of a group of times of one row."""
    kind, k, n = group["norm"], group["k"], group["n"]
    norm = Norm(kind, 1e-5, beta=kind == "layer") if kind else None
    if group["gated"]:
        return replace(gated(k, n, norm), rows=1)
    steps = tuple(group.get("epilogue", ()))
    return replace(matmul(k, n, norm, steps), rows=1, out_dtype=group["out_dtype"])


def _cuda() -> Iterator[Recorded]:
    """Yield a sample of the plans in CUDA C++ that were timed."""
    for group in _json(DATA / "2026-11-24-cuda_matmul.json")["groups"]:
        work = (gated if group["weights"] == 2 else matmul)(group["k"], group["n"])
        name = f"{group['model']} {group['case']} {group['rows']}"
        for *numbers, us in group["plans"]:
            plan = cuda_plan(numbers)
            yield Recorded("cuda", name, FAMILY["CudaMatmul"], work, plan, group["rows"], us)


def cuda_plan(numbers: list[int]) -> CudaPlan:
    """Return a plan in CUDA C++ from its numbers."""
    block_m, block_n, groups_m, groups_n, stages, cluster_m, split_k, swapped, blocks = numbers
    return CudaPlan(
        *(block_m, block_n, 64),
        num_stages=stages,
        num_warps=4 * (groups_m * groups_n + 1),
        family="cuda",
        groups_m=groups_m,
        groups_n=groups_n,
        cluster_m=cluster_m,
        split_k=split_k,
        swapped=swapped,
        blocks=blocks,
    )


def _mma() -> Iterator[Recorded]:
    """Yield plans of TIR's tensor cores, without their norm."""
    for group in _json(LOGS / "2026-11-21-mma_trials.json")["timings"]:
        case = {"gated": "gate_up"}.get(group["case"], group["case"])
        (block_m, block_n, block_k), (reg_m, reg_n) = group["tile"], group["warp"]
        plan = TilePlan(
            *(block_m, block_n, block_k),
            reg_m=reg_m,
            reg_n=reg_n,
            lanes=8,
            num_stages=group["stages"],
            split_k=group["split_k"],
            num_warps=block_m // reg_m * (block_n // reg_n),
            family=group["family"],
        )
        work, rows = replace(llama("8b", case), norm=None), group["rows"]
        yield Recorded(
            "mma", f"{case} {rows}", FAMILY["TensorCores"], work, plan, rows, group["us"]
        )


FEW_ROWS = {
    **{case: llama("8b", case) for case in ("qkv", "gate_up", "out", "down")},
    "down1b": llama("1b", "down"),
    "qkv1b": llama("1b", "qkv"),
    "kv": matmul(4096, 1024),
}
_FEW_LINE = re.compile(
    r"(\w+) (\d+) +([\d.]+) us +err \S+ +skinny (\d+)x(\d+)x(\d+) w(\d+) s(\d+) split(\d)( inside)?"
)


def _few_rows() -> Iterator[Recorded]:
    """Yield plans of TIR for at most 16 rows."""
    family = FAMILY["FewRows"]
    for line in (LOGS / "2026-11-21-skinny_plans.log").read_text(encoding="utf-8").splitlines():
        match = _FEW_LINE.fullmatch(line.rstrip())
        if match is None or match[1] not in FEW_ROWS:
            continue
        work, tile = FEW_ROWS[match[1]], tuple(map(int, match.groups()[3:9]))
        for plan in _of_tile(_plans_of(family, work), tile):
            if work.norm is None or normalises(plan) == bool(match[10]):
                group = f"{match[1]} {match[2]}"
                yield Recorded(
                    "few_rows", group, family, work, plan, int(match[2]), float(match[3])
                )
                break


def _of_tile(plans: Iterable[TilePlan], tile: tuple[int, ...]) -> Iterator[TilePlan]:
    """Yield those of some plans with a tile, warps, stages and parts of k."""
    for p in plans:
        if (p.block_m, p.block_n, p.block_k, p.num_warps, p.num_stages, p.split_k) == tile:
            yield p


_PACKED_PLAN = re.compile(r"(\d+)x(\d+)x(\d+) w(\d+) s(\d+)( k1)? ([\d.]+)")


def _packed_rows() -> Iterator[Recorded]:
    """Yield the fastest plans of TIR for at most 16 rows of weights of four bits."""
    family = FAMILY["PackedRows"]
    for line in (LOGS / "2026-11-23-packed_plans.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 5 or not cells[1].isdigit():
            continue
        case, rows, head = *cells[:2], matmul(4096, 128256)
        work = _with_four_bits(head if case == "head" else llama("8b", case))
        for words in _PACKED_PLAN.finditer(cells[-1]):
            tile = (*map(int, words.groups()[:5]), 1)
            for plan in _of_tile(_plans_of(family, work), tile):
                if family.plan.of(plan).keeps_row == bool(words[6]):
                    group, us = f"{case} {rows}", float(words[7])
                    yield Recorded("packed_rows", group, family, work, plan, int(rows), us)


def _with_four_bits(work: Work) -> Work:
    """Return a workload with weights as q4f16_1 stores them."""
    packed = Packed(4, 32, 7)
    if isinstance(work, GatedFFN):
        return replace(work, packed=packed)
    return replace(work, outputs=tuple(replace(p, packed=packed) for p in work.outputs))
