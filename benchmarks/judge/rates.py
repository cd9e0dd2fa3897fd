"""Fit the rates of all matmul kernels for NVIDIA GPUs to all recorded times, and judge prices.

    python -m benchmarks.judge.rates          # what today's rates give: losses, errors, families
    python -m benchmarks.judge.rates --fit    # fits them anew, and prints what it found
    python -m benchmarks.judge.rates --device FILE.json   # prices by a file of `calibrate`
    python -m benchmarks.judge.rates --tuned  # what the plans lose that `tune` would measure

No GPU is needed: `benchmarks.judge.recorded` reads the times.  What is fitted are the logarithms of
the fields of `Rates` and of `DEVICE`, by Gauss-Newton steps; errors beyond 12 % count less than
their squares, plans far from the fastest of a group count less, and what no time tells stays where
it is.
"""

from __future__ import annotations

import math
import statistics
import sys
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.judge.recorded import Recorded, records
from relax_fusion.estimator import Problem
from relax_fusion.estimator.families.matmuls import TilePrice, launch_of, launches
from relax_fusion.estimator.fitting import least_errors
from relax_fusion.estimator.gpu_cost import Launch, Rates, price, stacked
from relax_fusion.hardware import DeviceSpec
from relax_fusion.hardware.target import device_of, make_target

DEVICE = ("read_part", "l2_part", "slowed_part", "slowed_s")
"""The fields of a device that are fitted with the rates."""

NEAR, FAR = ((1.5, 1.0), (2.0, 0.5)), 0.1
"""Weights of plans up to so many times as long as the fastest of their group, and of others."""

CELLS = 1.6
"""The weight of a time that was taken beside those of other families."""


class Kernel(NamedTuple):
    """The times of a kernel, as the arrays that its price is computed with.

    Parameters
    ----------
    name : str
        What has these rates.
    rates : Rates
        As they are.
    launch : Launch
        All launches, those of one time after those of another.
    of : array of int
        The number of the time of each launch.
    rest_s : array of float
        What a price has beside its launches and their start.
    us, weights : array of float
        The times, and how much each counts.
    numbers : array of int
        Their places among all times.
    """

    name: str
    rates: Rates
    launch: Launch
    of: Any
    rest_s: Any
    us: Any
    weights: Any
    numbers: Any

    def errors(self, rates: Rates, dev: DeviceSpec) -> Any:
        """Return the logarithms of prices over times."""
        seconds = self.rest_s + rates.start_s
        seconds = seconds + np.bincount(self.of, price(self.launch, rates, dev).seconds)
        return np.log(1e6 * seconds / self.us)


def kernels(times: Sequence[Recorded], dev: DeviceSpec) -> list[Kernel]:
    """Return the kernels whose prices are those of tiles."""
    best: dict[tuple[str, str, str], float] = defaultdict(lambda: math.inf)
    for each in times:
        best[_group(each)] = min(best[_group(each)], each.us)
    kinds: dict[str, list[int]] = defaultdict(list)
    for number, each in enumerate(times):
        if isinstance(each.family.price(each.plan, Problem(each.work, dev)), TilePrice):
            kinds[each.kind].append(number)
    return [
        _kernel(kind, [times[i] for i in some], best, dev)._replace(numbers=np.array(some))
        for kind, some in kinds.items()
    ]


def _group(each: Recorded) -> tuple[str, str, str]:
    """Return what one time is compared with: of all families where they were timed together."""
    together = each.source == "families"
    return each.source, each.group, "" if together else type(each.family).__name__


def _kernel(
    kind: str, times: Sequence[Recorded], best: dict[tuple[str, str, str], float], dev: DeviceSpec
) -> Kernel:
    found, of, rest, weights = [], [], [], []
    for number, each in enumerate(times):
        priced = each.family.price(each.plan, Problem(each.work, dev))
        rates, columns = priced.rates, priced.columns
        tile = priced.tile._replace(late_s=0.0)  # kernels were timed alone
        own = [launch_of(tile, columns.shape, some, dev, each.rows) for some in columns.launches]
        whole = launches(tile, rates, columns, dev, each.rows).seconds
        of += [number] * len(own)
        found += own
        spent = sum(price(launch, rates, dev).seconds for launch in own)
        rest.append(whole - spent - rates.start_s)
        over = each.us / best[_group(each)]
        weight = next((w for most, w in NEAR if over < most), FAR)
        weights.append(weight * (CELLS if each.source == "families" else 1.0))
    arrays = (np.array(some) for some in (of, rest, [t.us for t in times], weights))
    return Kernel(kind, rates, stacked(found), *arrays, ())


class Unknown(NamedTuple):
    """A number that is fitted: of a kernel's rates, or of the device where there is none."""

    kernel: int | None
    field: str
    start: float


def fit(each: Sequence[Kernel], dev: DeviceSpec) -> tuple[list[Rates], DeviceSpec]:
    """Return the rates of each kernel, and the device, that give the times best."""
    unknowns = [Unknown(None, field, getattr(dev, field)) for field in DEVICE]
    for number, kernel in enumerate(each):
        known = kernel.rates._asdict().items()
        unknowns += [Unknown(number, f, v) for f, v in known if 0 < v < math.inf]

    def applied(x: Any) -> tuple[list[Rates], DeviceSpec]:
        rates, device = [kernel.rates for kernel in each], {}
        for (number, field, start), log in zip(unknowns, x, strict=True):
            value = float(start * math.exp(log))
            if number is None:
                device[field] = value
            else:
                rates[number] = rates[number]._replace(**{field: value})
        return rates, replace(dev, **device)

    def errors(x: Any) -> Any:
        rates, device = applied(x)
        return np.concatenate([k.errors(r, device) for k, r in zip(each, rates, strict=True)])

    weights = np.concatenate([kernel.weights for kernel in each])
    return applied(least_errors(errors, weights, len(unknowns)))


class Fares(NamedTuple):
    """How prices fare on times.

    Parameters
    ----------
    losses : dict
        By source and family, what the plan of the least price loses to the fastest of its group; by
        source and ``""``, what the family of the least price loses where they were timed together.
    errors : dict
        By kernel, the logarithms of prices over times, of plans up to 1.3 times as long as the
        fastest.
    """

    losses: dict[tuple[str, str], list[float]]
    errors: dict[str, list[float]]

    def text(self) -> str:
        """Return a line for each."""
        lines = []
        for (source, family), some in sorted(self.losses.items()):
            numbers = (
                f"{len(some)} groups, loss {statistics.fmean(some):.2%}, worst {max(some):.1%}"
            )
            lines.append(f"{source} {family or 'by all prices'}: {numbers}")
        for kind, some in sorted(self.errors.items()):
            size, mean = root_mean_square(some), statistics.fmean(some)
            lines.append(f"{kind}: {len(some)} near, error {size:.3f}, mean {mean:+.3f}")
        return "\n".join(lines)


def root_mean_square(some: Sequence[float]) -> float:
    """Return the root of the mean of squares."""
    return math.sqrt(statistics.fmean(e * e for e in some))


def judged(times: Sequence[Recorded], prices_us: Sequence[float]) -> Fares:
    """Compare prices with times."""
    groups: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for each, us in zip(times, prices_us, strict=True):
        groups[_group(each)].append((us, each.us, each.kind))
    fares = Fares(defaultdict(list), defaultdict(list))
    for (source, _, family), some in groups.items():
        best = min(us for _, us, _ in some)
        if len(some) > 1:
            fares.losses[source, family].append(min(some)[1] / best - 1)
        for priced, us, kind in some:
            fares.errors[kind] += [math.log(priced / us)] * (us < 1.3 * best)
    return fares


def prices_of(times: Sequence[Recorded], dev: DeviceSpec) -> list[float]:
    """Return today's prices in microseconds, of kernels alone, as they were timed."""

    def alone_s(e: Recorded) -> float:
        found = e.family.price(e.plan, Problem(e.work, dev))
        behind_s = found.tile.late_s * (e.rows == 1) if isinstance(found, TilePrice) else 0.0
        return float(found.at(e.rows).seconds - behind_s)

    return [1e6 * alone_s(e) for e in times]


TUNED, TOGETHER = (8, 16), 4
"""Plans that are measured of a group, and how many before prices are corrected."""


def tuned(times: Sequence[Recorded], prices_us: Sequence[float]) -> str:
    """Return what the fastest of so many plans loses, where groups have more.

    They are measured in the order of their prices; or the prices of what is left are corrected by
    those that were measured: of the same kernel where there are some, else of all.
    """
    groups: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for each, us in zip(times, prices_us, strict=True):
        groups[each.source, each.group].append((us, each.us, each.kind))
    lines = []
    for most in TUNED:
        large = [sorted(some) for some in groups.values() if len(some) > most]
        for first, how in ((most, "by price"), (TOGETHER, "by corrected prices")):
            lost = [
                _least_us(some, first, most) / min(us for _, us, _ in some) - 1 for some in large
            ]
            told = f"{statistics.fmean(lost):.2%}, worst {max(lost):.1%}"
            lines.append(f"{most} plans {how}: {len(lost)} groups, loss {told}")
    return "\n".join(lines)


def _least_us(some: Sequence[tuple[float, float, str]], first: int, most: int) -> float:
    """Return the least time of those that are measured: the first by price, others corrected."""
    done, rest = list(some[:first]), list(some[first:])
    while len(done) < most:
        over: dict[str, list[float]] = defaultdict(list)
        for priced, us, kind in done:
            over[kind].append(math.log(us / priced))
        every = statistics.fmean(x for logs in over.values() for x in logs)
        known = {kind: statistics.fmean(logs) for kind, logs in over.items()}
        rest.sort(key=lambda e: math.log(e[0]) + known.get(e[2], every))
        step = min(TOGETHER, most - len(done))
        done, rest = [*done, *rest[:step]], rest[step:]
    return min(us for _, us, _ in done)


def main(argv: Sequence[str] | None = None) -> int:
    """Judge today's prices, and fit them anew where that is asked for."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--fit", action="store_true", help="fit the rates anew")
    parser.add_argument("--tuned", action="store_true", help="judge what tune would measure")
    parser.add_argument("--device", default="h200", help="whose numbers prices are made of")
    args = parser.parse_args(argv)
    dev, times = device_of(make_target(args.device)), records()
    prices = prices_of(times, dev)
    text = tuned(times, prices) if args.tuned else judged(times, prices).text()
    print(f"{len(times)} times, {dev.label}\n\n{text}")
    if not args.fit:
        return 0
    every = kernels(times, dev)
    rates, device = fit(every, dev)
    for kernel, own in zip(every, rates, strict=True):
        for number, error in zip(kernel.numbers, kernel.errors(own, device), strict=True):
            prices[number] = times[number].us * math.exp(error)
    print(f"\nFitted:\n\n{judged(times, prices).text()}")
    print("\nDevice: " + ", ".join(f"{f}={getattr(device, f):.3g}" for f in DEVICE))
    for kernel, found in zip(every, rates, strict=True):
        usual = Rates()._asdict()
        own = {f: v for f, v in found._asdict().items() if v != usual[f]}
        print(f"{kernel.name}: Rates(" + ", ".join(f"{f}={v:.3g}" for f, v in own.items()) + ")")
    return 0


if __name__ == "__main__":
    sys.exit(main())
