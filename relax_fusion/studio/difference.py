"""What differs between two compilations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..estimator.tile_plan import Box
from ..report import Decision, Item
from ..report.sizes import sizes_text
from ..report.tables import size_text
from .compilation import Compilation

SHARED = ("source", "device", "dtype", "quantization")
"""The facts that two compilations are told to have in common."""

FACTS = ("source", "target", "dtype", "quantization", "max_seq_len", "batch")
"""These facts have to be the same for two compilations to be of one model for one target."""

DEFAULT = "as by default"
"""This text stands for an option that was not given."""

_ANY = 2**62

SAME_S = 1e-3
"""Two predicted times count as the same where they differ by at most this part."""


@dataclass(frozen=True, order=True)
class ChainKey:
    """What tells a chain from others, whatever its dtype and its variables are called."""

    function: str
    chain: str
    """Where it is, and the pass and the steps."""
    sizes: str
    """M x N x K of its matmuls."""

    @staticmethod
    def of(item: Item) -> ChainKey:
        """Return the key of a fused chain."""
        each = (
            (f"{p.batch} times " if p.batch != 1 else "") + f"{p.m} x {p.n} x {p.k}"
            for p in item.products
        )
        sizes = ", ".join(each)
        if item.kind == "attention" and item.products:
            first = item.products[0]
            sizes = f"{first.batch} heads, {first.m} x {first.n} keys, {first.k} features"
        return ChainKey(item.function, item.chain, sizes)


def difference(a: Compilation, b: Compilation) -> dict[str, Any]:
    """Compare two compilations.

    Returns
    -------
    dict
        ``both``: model, device and dtype where they are the same.
        ``facts``: name of a fact or an option, and its value in A and in B, where they differ.
        ``lost``, ``gained`` and ``replaced``: chains with counts, and the predicted seconds of one
        by size; a replaced one is no kernel in B, where as many operations of its function are in
        kernels as in A.
        ``left``: what is left in more or fewer places.
        ``plans``: ranges of sizes with other tiles.  ``times``: predicted and measured seconds of
        chains in both.  ``calls``: predicted seconds of all fused kernels of a call, with its
        sizes, where both fuse the same chains.  ``files``: bytes that differ.  ``kernels``: names
        that are new, gone or have other code, and whether both have hashes of their code.
    """
    chains = _chains(a), _chains(b)
    fewer = _more(a, *chains)
    more = _more(b, *reversed(chains))
    dropped = _dropped(a, b)
    plans, times = [], []
    for key in sorted(chains[0].keys() & chains[1].keys()):
        for items in zip(*(found[key] for found in chains), strict=False):
            one, two = (_decision(x, item) for x, item in zip((a, b), items, strict=True))
            if one is not None and two is not None:
                plans += _plans(key, one, two)
                times += _times(key, one, two)
    return {
        "both": {n: a.fact(n) for n in SHARED if a.fact(n) == b.fact(n) is not None},
        "facts": _facts(a, b),
        "lost": [c for c in fewer if c["function"] in dropped],
        "replaced": [c for c in fewer if c["function"] not in dropped],
        "gained": more,
        "left": _left(a, b),
        "plans": plans,
        "times": times,
        "calls": [] if fewer or more else _calls(a, b),
        "files": _changed(a.files, b.files),
        "kernels": _kernels(a.report.kernels, b.report.kernels),
    }


def _facts(a: Compilation, b: Compilation) -> dict[str, dict[str, Any]]:
    """Return what differs of the model, the target and the options, where both tell of those."""
    found = {n: {"a": a.fact(n), "b": b.fact(n)} for n in FACTS}
    one, two = a.fact("options"), b.fact("options")
    if isinstance(one, dict) and isinstance(two, dict):
        names = sorted({*one, *two})
        found |= {n: {"a": one.get(n, DEFAULT), "b": two.get(n, DEFAULT)} for n in names}
    return {name: each for name, each in found.items() if each["a"] != each["b"]}


def is_equal(found: Mapping[str, Any]) -> bool:
    """Tell whether nothing differs."""
    kernels = found["kernels"]
    parts = ("facts", "lost", "replaced", "gained", "left", "plans", "times", "calls", "files")
    return not any(found[part] for part in parts) and not any(
        kernels[name] for name in ("new", "gone", "changed")
    )


def _chains(one: Compilation) -> dict[ChainKey, list[Item]]:
    found: dict[ChainKey, list[Item]] = {}
    for item in one.report.work:
        if item.status == "fused":
            found.setdefault(ChainKey.of(item), []).append(item)
    return found


def _more(
    one: Compilation, chains: Mapping[ChainKey, list[Item]], others: Mapping[ChainKey, list[Item]]
) -> list[dict[str, Any]]:
    """Return the chains of which there are more in `one` than among others: how many, how long."""
    found = []
    for key, items in sorted(chains.items()):
        count = sum(i.count for i in items) - sum(i.count for i in others.get(key, ()))
        if count > 0:
            decision = _decision(one, items[0])
            predictions = decision.predictions if decision is not None else ()
            seconds = {size_text(p): p.fused.seconds for p in predictions}
            found.append({**vars(key), "count": count, "seconds": seconds})
    return found


def _dropped(a: Compilation, b: Compilation) -> set[str]:
    """Return the functions of A of which fewer operations are in kernels in B."""
    ours, theirs = _covered(a), _covered(b)
    return {
        function
        for function, counts in ours.items()
        if any(theirs.get(function, {}).get(name, 0) < n for name, n in counts.items())
    }


def _covered(one: Compilation) -> dict[str, dict[str, int]]:
    """Return, by function, how many chains of each kind are in kernels, and how many matmuls."""
    found = {
        c.function: {n: ours for n, (ours, _) in c.chains.items()} for c in one.report.coverage
    }
    for item in one.report.work:
        if item.status == "fused":
            counts = found.setdefault(item.function, {})
            counts["matmuls"] = counts.get("matmuls", 0) + item.count * len(item.products)
    return found


def _decision(one: Compilation, item: Item) -> Decision | None:
    decisions = (d for d in one.report.decisions if d.kernel == item.kernel)
    return next((d for d in decisions if d.function == item.function), None)


def _plans(key: ChainKey, a: Decision, b: Decision) -> list[dict[str, Any]]:
    """Return the ranges of either in whose last sizes two decisions have other tiles."""
    tables = [d.plans for d in (a, b) if d.plans is not None]
    boxes = {box for table in tables for box, _ in table.boxes}
    found = []
    for box in sorted(boxes if len(tables) == 2 else (), key=_corner):
        rows, keys, batch = _corner(box)
        first, second = (t.plan_for(rows, keys=keys, batch=batch).text for t in tables)
        if first != second:
            found.append({**vars(key), "range": str(box), "a": first, "b": second})
    return found


def _corner(box: Box) -> tuple[int, int, int]:
    """Return the last sizes of a box, or more than any kernel has where they have no bound."""
    rows, keys, batch = (_ANY if n is None else n for n in (box.rows, box.keys, box.batch))
    return rows, keys, batch


def _times(key: ChainKey, a: Decision, b: Decision) -> list[dict[str, Any]]:
    """Return the sizes at which two decisions have other times."""
    one, two = ({size_text(p): p for p in d.predictions} for d in (a, b))
    found = []
    for size in one.keys() & two.keys():
        first, second = one[size], two[size]
        both = {
            "fused_s": (first.fused.seconds, second.fused.seconds),
            "measured_s": (first.measured_s, second.measured_s),
        }
        other = {name: {"a": x, "b": y} for name, (x, y) in both.items() if _differ(x, y)}
        if other:
            found.append({**vars(key), "size": size, **other})
    return sorted(found, key=lambda entry: (len(entry["size"]), entry["size"]))


def _calls(a: Compilation, b: Compilation) -> list[dict[str, Any]]:
    """Return the calls whose fused kernels take other times; other kernels are in no price."""
    one, two = (
        {(c.function, sizes_text(c.sizes)): c.fused_s for c in x.report.calls} for x in (a, b)
    )
    return [
        {"function": key[0], "sizes": key[1], "a": one[key], "b": two[key]}
        for key in one
        if key in two and _differ(one[key], two[key])
    ]


def _differ(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is not b
    return abs(a - b) > SAME_S * max(abs(a), abs(b))


def _left(a: Compilation, b: Compilation) -> list[dict[str, Any]]:
    """Return what is left in more or fewer places, for one reason."""
    one, two = (Counter((x.function, x.kind, x.reason) for x in c.report.leftovers) for c in (a, b))
    names = ("function", "kind", "reason")
    return [
        {**dict(zip(names, key, strict=True)), "a": one[key], "b": two[key]}
        for key in sorted({*one, *two})
        if one[key] != two[key]
    ]


def _changed(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, dict[str, int | None]]:
    """Return what differs, where both are directories."""
    if not a or not b:
        return {}
    names = sorted({*a, *b})
    return {n: {"a": a.get(n), "b": b.get(n)} for n in names if a.get(n) != b.get(n)}


def _kernels(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, Any]:
    if not a or not b:
        return {"known": False, "new": [], "gone": [], "changed": []}
    one, two = _other_code(a, b)
    return {
        "known": True,
        "new": sorted(two.keys() - one.keys()),
        "gone": sorted(one.keys() - two.keys()),
        "changed": sorted(one.keys() & two.keys()),
    }


def _other_code(
    a: Mapping[str, str], b: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the kernels of each whose code is not in the other, under whatever name it is there.

    TVM numbers kernels of one name in the order in which it meets them, so that one more kernel
    renames those behind it.
    """
    same = {name for name in a.keys() & b.keys() if a[name] == b[name]}
    one, two = ({n: code for n, code in of.items() if n not in same} for of in (a, b))
    both = Counter(one.values()) & Counter(two.values())
    return _without(one, both), _without(two, both)


def _without(kernels: Mapping[str, str], codes: Mapping[str, int]) -> dict[str, str]:
    """Return the kernels that are left where each code is taken as often as `codes` says."""
    taken: Counter[str] = Counter()
    left = {}
    for name, code in sorted(kernels.items()):
        taken[code] += 1
        if taken[code] > codes[code]:
            left[name] = code
    return left
