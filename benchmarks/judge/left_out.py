"""Times of one NVIDIA GPU by numbers of another: what prices are worth where nobody measured.

    python -m benchmarks.judge.left_out

The H100's kept times of matmuls, of attention and of a whole model are priced by its data sheet and
what was fitted to times of an H200; then by that data sheet times what `calibrate` measured on an
H200 over the H200's.  The other way round, the rates of Triton's matmuls are fitted to the H100's
times alone, and the H200's times of the same kernels are priced by them.  No GPU is needed.
"""

from __future__ import annotations

import math
import statistics
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.judge import judgement
from benchmarks.judge.models import Item, JudgeModels
from benchmarks.judge.rates import Fares, fit, judged, kernels, prices_of
from benchmarks.judge.recorded import FAMILY, Recorded, h200, records
from benchmarks.recording import RESULTS
from benchmarks.runner import read
from benchmarks.suites.attention.subject import CaseIn
from benchmarks.suites.matmul.subject import ChainAt
from relax_fusion.estimator import Problem
from relax_fusion.estimator.registry import option_of
from relax_fusion.hardware import DeviceSpec, device
from relax_fusion.hardware.target import device_of, make_target

MATMULS = RESULTS / "2026-11-22-judge_matmul-h100.json"
ENCODERS = RESULTS / "2026-11-26-bench_encoders-large8.json"
ATTENTION = RESULTS / "2026-11-22-bench_attention-h100.json"
SWEEP = RESULTS / "2026-11-29-calibrate-h200.json"
RATES = (
    *("clock_hz", "dram_bytes_per_s", "l2_bytes_per_s", "fma_float32_flops_per_s"),
    "tensor_float16_flops_per_s",
)
"""What float16 is priced by of all that `calibrate` measures, but launches."""


def h100(sweep: DeviceSpec | None = None) -> DeviceSpec:
    """Return an H100 of which only the data sheet is known: launches cost what an H200's do."""
    spec, known = replace(device("h100"), launch_s=h200().launch_s), h200()
    if sweep is None:
        return spec
    parts = {name: getattr(sweep, name) / getattr(known, name) for name in RATES}
    rates = {name: getattr(spec, name) * part for name, part in parts.items()}
    return replace(spec, launch_s=sweep.launch_s, **rates)


def matmuls() -> Iterator[Recorded]:
    """Yield the times of Triton's matmuls on an H100, of kernels that there still are."""
    for stored in read(MATMULS)["cases"]:
        group = judgement.from_json(stored, ChainAt.from_json)
        work, rows = group.subject.work(), group.subject.extent
        for plan, ms in zip(group.plans, group.ms, strict=True):
            family = FAMILY["TritonMatmul"]
            yield Recorded("h100", group.name, family, work, plan, rows, 1e3 * ms)


def attention_errors(dev: DeviceSpec) -> list[float]:
    """Return the logarithms of prices over times of attention on an H100."""
    errors, record = [], read(ATTENTION)
    for case in record["cases"]:
        subject = CaseIn.from_json({**case, "dtype": record["dtype"]})
        words = case["plan"].replace("pointer", "attention")  # as it is called since
        plan = judgement.plan_of(words)
        option = option_of(plan, Problem(subject.work(), dev))
        us = 1e6 * option.price.at(subject.size).seconds
        errors.append(math.log(us / case["us"]["ours"]))
    return errors


def told(fares: Fares) -> str:
    """Return how prices fare in a line: errors of plans near the fastest, and losses."""
    losses = [loss for some in fares.losses.values() for loss in some]
    errors = [error for some in fares.errors.values() for error in some]
    return (
        f"{size(errors)}; choices lose {statistics.fmean(losses):.1%} in the mean, "
        f"{max(losses):.1%} at most, of {len(losses)} groups"
    )


def size(errors: Sequence[float]) -> str:
    """Return how large errors are."""
    parts = [abs(math.expm1(error)) for error in errors]
    return (
        f"{len(parts)} times, off by {statistics.fmean(parts):.1%} in the mean, "
        f"{max(parts):.1%} at most"
    )


def by_h100(times: Sequence[Recorded]) -> tuple[list[Recorded], list[float]]:
    """Return the H200's times of some kernels, and prices by rates that the H100's times give."""
    known = device("h100")
    every = kernels(times, known)
    rates, fitted = fit(every, known)
    own = {kernel.name: found for kernel, found in zip(every, rates, strict=True)}
    dev = replace(h200(), read_part=fitted.read_part, l2_part=fitted.l2_part)
    there = [each for each in records() if each.kind in own]
    prices = [0.0] * len(there)
    for kernel in kernels(there, dev):
        errors = kernel.errors(own[kernel.name], dev)
        for number, error in zip(kernel.numbers, errors, strict=True):
            prices[number] = there[number].us * math.exp(error)
    return there, prices


def bert_large() -> str:
    """Return what eight sequences of BERT large take on an H100, by the data sheet and measured."""
    entry = read(ENCODERS)["cases"][0]
    measured_s, sizes = 1e-6 * entry["us"]["ours"], f"8 x {entry['tokens']}"
    item = Item("encoders", entry["case"], sizes, "main", {}, measured_s, entry)
    predicted_s = JudgeModels(Namespace(target="h100")).measured(item)["predicted_s"]
    return f"predicted {1e6 * predicted_s:.0f} us, measured {1e6 * measured_s:.0f}"


def main() -> int:
    """Judge an H100 by what is known of an H200, and the other way round."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    times, sweep = list(matmuls()), device_of(make_target(str(SWEEP)))
    for name, dev in (("rates", h100()), ("sweep", h100(sweep))):
        print(f"H100's matmuls by the H200's {name}: {told(judged(times, prices_of(times, dev)))}")
        print(f"H100's attention by the H200's {name}: {size(attention_errors(dev))}")
    print(f"BERT large on an H100, launches as measured there: {bert_large()}")
    there, prices = by_h100(times)
    print(f"H200's Triton matmuls by the H100's times: {told(judged(there, prices))}")
    print(f"the same by the H200's: {told(judged(there, prices_of(there, h200())))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
