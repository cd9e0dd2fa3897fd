"""Tables of how the estimator fares against timings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from benchmarks.judge.judgement import Group, Judged, Judgement
from benchmarks.recording import markdown_table
from benchmarks.report import Entry, cell, plan_words

MISS = 0.10
REGRET_LIMIT, CORRELATION_LIMIT, CHOOSE_LIMIT_MS = 0.10, 0.9, 50.0


def overall(judged: Judged) -> dict[str, float]:
    """Return the means, and the worst."""
    regrets = [j.regret for _, j in judged]
    tables = [j.table_regret for _, j in judged if not math.isnan(j.table_regret)]
    of_timed = [j.regret for _, j in judged if j.choice_timed]
    near = [e for g, j in judged for e in _near_errors(g, j)]
    return {
        "cases": len(judged),
        "mean_regret": statistics.fmean(regrets),
        "max_regret": max(regrets),
        "misses": sum(r > MISS for r in regrets),
        "mean_regret_of_timed_choices": _mean(of_timed),
        "mean_table_regret": _mean(tables),
        "max_table_regret": max(tables, default=math.nan),
        "mean_correlation": _mean([j.correlation for _, j in judged]),
        "superseded_plans": sum(j.superseded for _, j in judged),
        "mean_correlation_of_all": _mean([j.correlation_of_all for _, j in judged]),
        "mean_error_near_best": statistics.fmean(near),
        "max_choose_ms": max(j.choose_ms for _, j in judged),
        "choice_not_timed": sum(not j.choice_timed for _, j in judged),
    }


def _mean(values: Sequence[float]) -> float:
    """Return the mean of what is not NaN; NaN if nothing is left."""
    numbers = [v for v in values if not math.isnan(v)]
    return statistics.fmean(numbers) if numbers else math.nan


def _near_errors(group: Group, j: Judgement) -> list[float]:
    """Return how far the predictions of plans within 30 % of the best are off, as a part."""
    pairs = zip(j.predicted_ms, group.ms, strict=True)
    return [abs(math.log(p / t)) for p, t in pairs if t < 1.3 * group.ms[j.best]]


def summary(judged: Judged) -> str:
    """Return the figures of `overall` with their limits, in words."""
    o = overall(judged)

    def held(good: bool) -> str:
        return "reached" if good else "missed"

    mean, rank, took = o["mean_regret"], o["mean_correlation"], o["max_choose_ms"]
    superseded = ""
    if o["superseded_plans"]:
        superseded = f"; with {o['superseded_plans']:.0f} timings of plans that are candidates "
        superseded += f"no more {o['mean_correlation_of_all']:.3f}"
    return "\n".join(
        [
            f"- top-1 regret: mean {mean:.1%} (at most {REGRET_LIMIT:.0%}: "
            f"{held(mean <= REGRET_LIMIT)}), largest {o['max_regret']:.1%}, "
            f"above {MISS:.0%} in {o['misses']:.0f} of {o['cases']:.0f} cases",
            f"- choices that were not timed: {o['choice_not_timed']:.0f}; in their place stands "
            f"the timed plan of the next prediction; mean without them "
            f"{o['mean_regret_of_timed_choices']:.1%}",
            f"- of the table for symbolic sizes: mean {o['mean_table_regret']:.1%}, largest "
            f"{o['max_table_regret']:.1%}",
            f"- rank correlation: mean {rank:.3f} (at least {CORRELATION_LIMIT}: "
            f"{held(rank >= CORRELATION_LIMIT)}){superseded}",
            f"- choosing: at most {took:.1f} ms (limit {CHOOSE_LIMIT_MS:.0f} ms: "
            f"{held(took <= CHOOSE_LIMIT_MS)})",
            f"- predictions of plans within 30 % of the best are off by "
            f"{o['mean_error_near_best']:.1%}",
        ]
    )


def earlier(o: dict[str, float]) -> str:
    """Return in a sentence what the model reached that was there when the plans were timed."""
    return (
        f"The model of the time of the run: regret mean {o['mean_regret']:.1%}, largest "
        f"{o['max_regret']:.1%}; of the table for symbolic sizes mean "
        f"{o['mean_table_regret']:.1%}; rank correlation {o['mean_correlation']:.3f}; predictions "
        f"near the best off by {o['mean_error_near_best']:.1%}.  The model of now:"
    )


def line(entry: Entry, judged: Judged) -> str:
    """Return an entry in one line."""
    for group, j in judged:
        return (
            f"{group.name}: {len(group.plans)} plans, best {_us(group.ms[j.best])} us "
            f"{_named(group, j.best)}, regret {j.regret:.1%} {_named(group, j.chosen)}, table "
            f"{j.table_regret:.1%}, rank {j.correlation:.3f}, {j.choose_ms:.0f} ms"
        ) + _bad(entry)
    return "no plan has a time" + _bad(entry)


def _bad(entry: Entry) -> str:
    counts = ((len(entry[kind]), kind) for kind in ("wrong", "failed"))
    return "".join(f", {count} {kind.upper()}" for count, kind in counts if count)


def markdown(judged: Judged) -> str:
    """Return the tables: every case, and the misses."""
    return "\n\n".join(part for part in (summary(judged), _cases(judged), _misses(judged)) if part)


def _cases(judged: Judged) -> str:
    rows: list[tuple[str, ...]] = [
        (
            *("case", "dtype", "plans timed", "feasible", "chosen", "us", "best"),
            *("us", "regret", "regret of the table", "rank correlation", "choose, ms"),
        )
    ]
    for g, j in judged:
        chosen = _named(g, j.chosen) + ("" if j.choice_timed else " (for the choice)")
        table = "" if math.isnan(j.table_regret) else f"{j.table_regret:.1%}"
        rank = "" if math.isnan(j.correlation) else f"{j.correlation:.3f}"
        rows.append(
            (
                *(g.name, g.subject.dtype, str(len(g.plans))),
                *(str(g.feasible or ""), chosen, _us(g.ms[j.chosen])),
                *(_named(g, j.best), _us(g.ms[j.best]), f"{j.regret:.1%}", table, rank),
                f"{j.choose_ms:.1f}",
            )
        )
    return markdown_table(rows)


def _misses(judged: Judged) -> str:
    rows = [("case", "regret", "chosen", "predicted, us", "us", "best", "predicted, us", "us")]
    for g, j in sorted(judged, key=lambda pair: -pair[1].regret):
        if j.regret > MISS:
            cells = (
                (_named(g, i), _us(j.predicted_ms[i]), _us(g.ms[i])) for i in (j.chosen, j.best)
            )
            rows.append((g.name, f"{j.regret:.1%}", *(c for three in cells for c in three)))
    return f"## Misses\n\n{markdown_table(rows)}" if len(rows) > 1 else ""


def problems(entries: Sequence[Entry], name_of: Callable[[Entry], str]) -> str:
    """Return the table of plans that are wrong or fail."""
    rows = [("case", "plan", "what happened")]
    for e in entries:
        lost = [{"plan": "all", "why": e["error"]}] if "error" in e else []
        bad = (*lost, *e.get("wrong", ()), *e.get("failed", ()))
        rows += [(name_of(e), kept["plan"], cell(str(kept["why"]))) for kept in bad]
    return f"## Plans that are wrong or fail\n\n{markdown_table(rows)}" if len(rows) > 1 else ""


def _named(group: Group, index: int) -> str:
    return plan_words(group.plans[index])


def _us(milliseconds: float) -> str:
    return f"{1e3 * milliseconds:.1f}"
