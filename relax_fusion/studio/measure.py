"""Feeding a decoder for its times and logits, comparing runs, and telling what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import fsum
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ..estimator import format_seconds
from ..models import ExportedModel
from ..report import Table
from ..timing import timed
from .html import link


def tokens(count: int, vocab_size: int) -> np.ndarray:
    """Return `count` token numbers, the same in every run, spread over the vocabulary."""
    return (np.arange(1, count + 1, dtype=np.int64) * 7919 % vocab_size).astype(np.int32)


class Session(Protocol):
    """A decoder with its context, as `Generator` is one."""

    def reset(self) -> None:
        """Forget the context."""

    def prefill(self, ids: Any) -> np.ndarray:
        """Append tokens; the logits of the last one, on the host."""

    def decode(self, ids: Any) -> np.ndarray:
        """Append a token to each sequence; its logits."""


Turn = Mapping[str, Sequence[float]]
"""Seconds by step: of the prompt and of each token after it, or of each call."""


def decoded(session: Session, ids: np.ndarray, prompt: int) -> tuple[Turn, list[np.ndarray]]:
    """Feed a prompt and some tokens, each timed until its logits are on the host.

    The tokens ``[batch, count]`` are given, so that runs can be compared; the first `prompt` of
    them are the prompt.  The session's context is forgotten before.

    Returns the seconds of the prompt ("prefill") and of each token after it ("decode"), and the
    logits after the prompt and after the last token.
    """
    session.reset()
    logits, prefill = timed(lambda: session.prefill(ids[:, :prompt]))
    results, decode = [logits], []
    for column in ids.T[prompt:]:
        logits, taken = timed(partial(session.decode, column))
        decode.append(taken)
        results[1:] = [logits]
    return {"prefill": [prefill], "decode": decode}, results


MOST_EXPLAINED = 0.5
"""Rounding may explain a difference of this part of the largest logit."""


def compare(
    one: Sequence[np.ndarray], two: Sequence[np.ndarray], exported: ExportedModel
) -> tuple[float, float]:
    """Return the largest difference of two runs' logits, and what rounding alone can explain.

    A sum of ``k`` products, in any order, errs by about ``sqrt(k)`` roundings of its size.  The
    logits come out of a chain of such sums: in each layer the projection to q, k and v, the scores,
    their mean of the values, the output projection, the two steps of the FFN and the norms; then
    the head.  Each is about as large as its inputs, because a norm resets the scale.  Errors of
    different sums have nothing to do with each other: their squares add, and those of both runs.

    In 16 bits that can come to more than the logits; results that are unrelated differ by 1.4
    times the largest.  So no more is explained than `MOST_EXPLAINED` of it.
    """
    config = exported.config
    longest = max(config.hidden_size, config.intermediate_size)
    sums = 7 * config.num_layers + 1
    rounding = float(ml_dtypes.finfo(exported.dtype).eps) / 2
    pairs = list(zip(one, two, strict=False))
    largest = max(float(np.abs(a).max()) for a, _ in pairs)
    tolerance = min(MOST_EXPLAINED, (2 * sums * longest) ** 0.5 * rounding) * largest
    worst = float(np.max([np.abs(a - b).max() for a, b in pairs]))
    return worst, tolerance


MISS = 0.2
"""A measured time is a miss where it differs from the predicted one by more than this part."""

_TITLES = {"prefill": "time to first token", "decode": "each token after it"}


def measured_parts(
    record: Mapping[str, Any], links: Mapping[str, str] | None = None
) -> list[Table | str]:
    """Return what ``bench --json`` wrote; `links` are places of a page that tell of kernels."""
    machine, contenders = record["machine"], record["contenders"]
    sizes = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in record["sizes"].items())
    stored = record["quantization"] or record["dtype"]
    batch = f", batch {record['batch']}" if record["batch"] else ""
    where = machine.get("gpu", machine["cpu"])
    heading = f"{record['source']}, {stored}{batch}, on {where}{': ' * bool(sizes)}{sizes}"
    parts: list[Table | str] = [f"{heading}; load average before {machine['load_average']:.1f}"]
    if record["is_interrupted"]:
        parts.append("INTERRUPTED: these are the times until then.")
    steps = dict.fromkeys(step for each in contenders.values() for step in each["steps"])
    parts += [_step(step, contenders) for step in steps]
    failed = [f"{who}: not measured: {why}" for who, why in record["failed"].items()]
    parts.append("\n".join([*map(_about, contenders, contenders.values()), *failed]))
    first: Mapping[str, Any] = next(iter(contenders.values()), {"steps": {}})
    for step, kernels in record["kernels"].items():
        called = first["steps"].get(step, {"p50_s": None})["p50_s"]
        parts.append(_kernels(step, kernels, called, links or {}))
    if record["kernels"]:
        parts.append(f"Kernels are timed so: {record['kernels_are_timed']}.")
    return parts


def _step(step: str, contenders: Mapping[str, Any]) -> Table:
    """Return the times of everybody in one step, ours first."""
    head = (_TITLES.get(step, step), "threads", "size", "p50", "p90", "p99", "tokens/s", "times")
    rows: list[tuple[str, ...]] = [(*head, "of relax_fusion")]
    own = next(iter(contenders.values()))["steps"].get(step)
    for who, each in contenders.items():
        it = each["steps"].get(step)
        if it is None or own is None:
            continue
        times = (format_seconds(it[f"p{percent}_s"]) for percent in (50, 90, 99))
        rate = "" if it["tokens_per_s"] is None else f"{it['tokens_per_s']:,.1f}"
        told = (str(each["threads"] or ""), it["size"], *times, rate, str(it["count"]))
        rows.append((who, *told, f"{it['p50_s'] / own['p50_s']:.2f}x"))
    return Table("", rows)


def _about(who: str, each: Mapping[str, Any]) -> str:
    """Return what exactly ran, and whether its results are ours."""
    once = "" if each["is_warm"] else "; one turn, not warmed up"
    return f"{who}: {each['about']}{once}{_agreement(each['agreement'])}"


def _agreement(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    worst = found["largest_relative_difference"]
    if worst is None:
        return "; results have other shapes, and are not compared"
    if found["tolerance"] is None:
        return f"; results differ by {worst:.1e} of the largest"
    verdict = "agree" if found["agrees"] else "DISAGREE"
    return (
        f"; results {verdict}: they differ by {found['largest_difference']:.1e}, which is "
        f"{worst:.1e} of the largest; rounding can explain {found['tolerance']:.1e}"
    )


def _kernels(
    step: str, kernels: list[Mapping[str, Any]], called: float | None, links: Mapping[str, str]
) -> Table:
    """Return kernels, and what a call of `called` seconds spends outside of them."""
    rows: list[tuple[str, ...]] = [
        ("kernel", "size", "runs", "measured", "in a call", "predicted", "measured/predicted")
    ]
    known = []
    for each in kernels:
        name, taken, least = each["kernel"], each["p50_s"], each["resolution_s"]
        predicted, runs = each["predicted_s"], each["launches"]
        shown = link(name, f"#{links[name]}") if name in links else name
        cells = (shown, each["size"], str(runs))
        told = "" if predicted is None else format_seconds(predicted)
        if taken < least:
            rows.append((*cells, f"< {format_seconds(least)}", "", told, ""))
            continue
        times = (format_seconds(taken), format_seconds(runs * taken), told)
        rows.append((*cells, *times, ratio_text(taken, predicted)))
        known += [(runs * taken, runs * predicted)] if predicted else []
    total = fsum(each["launches"] * each["p50_s"] for each in kernels)
    rows.append(("all", "", "", "", format_seconds(total), "", ""))
    if called is not None and called > total:
        rows.append(("outside kernels", "", "", "", format_seconds(called - total), "", ""))
    if known:
        both = [fsum(column) for column in zip(*known, strict=True)]
        sums = (*map(format_seconds, both), f"{both[0] / both[1]:.2f}")
        rows.append(("all with a prediction", "", "", "", *sums))
    return Table(f"Kernels of {step}", rows)


def ratio_text(measured: float | None, predicted: float | None) -> str:
    """Return a measured time over the predicted one, and whether that is a miss."""
    if not measured or not predicted:
        return ""
    ratio = measured / predicted
    return f"{ratio:.2f}" + (", a miss" if abs(ratio - 1) > MISS else "")
