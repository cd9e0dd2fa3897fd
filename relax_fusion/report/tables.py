"""Tables of a report: columns of text, and what they say of coverage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..validation import printable
from .coverage import Coverage, Leftover
from .decision import Decision, LeftOut, Scheduling


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows of text in columns; the first row is the head."""
    rows = [[printable(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows]
    text = ["  ".join(row).rstrip() for row in padded]
    return "\n".join([text[0], "  ".join("-" * w for w in widths), *text[1:]])


def autotune_table(decisions: Sequence[Decision]) -> str:
    """One row per kernel and range of sizes, with the plans that the library measures there."""
    kernels = {d.kernel: d for d in decisions if d.embedded}
    if not kernels:
        return ""
    rows: list[tuple[str, ...]] = [("kernel", "sizes", "measured at the first call")]
    for name, decision in kernels.items():
        for each in decision.embedded:
            plans = [f"{p.text} ({p.num_warps} warps, {p.num_stages} stages)" for p in each.plans]
            told = "; ".join(plans) if not each.why else f"nothing: {plans[0]}, {each.why}"
            rows.append((name, str(each.box), told))
            name = ""
    return table(rows)


def validation_table(decisions: Sequence[Decision]) -> str:
    """One row for what was found out about kernels, with how many of them it holds for."""
    counts = Counter(d.validation for d in decisions if d.validation)
    if not counts:
        return ""
    return table([("kernels", "validation"), *((str(n), what) for what, n in counts.items())])


def left_out_table(left: Sequence[LeftOut]) -> str:
    """One row for what was left out, with what failed where it was not."""
    if not left:
        return ""
    return table([("left out", "failed in", "with"), *((x.name, x.where, x.error) for x in left)])


def leftovers_table(leftovers: Sequence[Leftover]) -> str:
    """One row for what was left for a reason, with how often that was and where first."""
    if not leftovers:
        return ""
    counts = Counter((x.function, x.kind, x.reason) for x in leftovers)
    first = {(x.function, x.kind, x.reason): x.where for x in reversed(leftovers)}
    rows: list[tuple[str, ...]] = [("function", "left", "times", "first", "because")]
    rows += [(*key[:2], str(count), first[key], key[2]) for key, count in counts.items()]
    return table(rows)


def coverage_table(coverage: Sequence[Coverage]) -> str:
    """One row per function: chains found of those there are, launches, bytes that are copied."""
    if not coverage:
        return ""
    chains = list(dict.fromkeys(name for c in coverage for name in c.chains))
    rows: list[tuple[str, ...]] = [
        ("function", *chains, "launches", "a layer", "copies", "bytes copied", "where")
    ]
    for c in coverage:
        counts = ("{} of {}".format(*c.chains[n]) if n in c.chains else "" for n in chains)
        rows.append((c.function, *counts, *_launched(c)))
    return table(rows)


def _launched(coverage: Coverage) -> tuple[str, ...]:
    launches = coverage.launches
    if launches is None:
        return ("",) * 5
    return (
        str(len(launches.kernels)),
        str(coverage.per_layer or ""),
        str(len(launches.copies)),
        f"{coverage.copied:,}",
        ", ".join(f"{name} = {value}" for name, value in launches.symbols),
    )


def schedules_table(schedules: Sequence[Scheduling]) -> str:
    """One row per rule and tiles, with how many functions it scheduled and the first of them."""
    if not schedules:
        return ""
    found: dict[tuple[str, str, str], list[str]] = {}
    for s in schedules:
        plans = dict.fromkeys(plan for _, plan in s.plans.boxes) if s.plans else {}
        tiles = "; ".join(plan.text for plan in plans)
        why = "; ".join(f"{rule}: {decline}" for rule, decline in s.refusals)
        found.setdefault((s.rule or "none", tiles, why), []).append(s.function)
    rows = [("rule", "functions", "first", "tiles", "could not")]
    rows += [
        (rule, str(len(names)), names[0], tiles, why) for (rule, tiles, why), names in found.items()
    ]
    return table(rows)
