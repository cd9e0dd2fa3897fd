"""Numbers as people read them; what is no number is a dash."""

from __future__ import annotations

from math import isfinite

MISSING = "–"

_UNITS = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def number(value: float | None) -> float | None:
    """Return a finite number; None for NaN, infinities and what is missing."""
    return None if value is None or not isfinite(value) else float(value)


def seconds(value: float | None) -> str:
    """Return a time with three digits: ``"54.6 µs"``."""
    value = number(value)
    if value is None:
        return MISSING
    if value == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= scale * 0.9995:
            return f"{_three(value / scale)} {unit}"
    return f"{_three(value / 1e-9)} ns"


def scaled(value: float | None, unit: str) -> str:
    """Return a large number with three digits, a prefix and its unit: ``"4.8 TB/s"``."""
    value = number(value)
    if value is None:
        return MISSING
    for prefix, scale in _UNITS:
        if abs(value) >= scale * 0.9995:
            return f"{_three(value / scale)} {prefix}{unit}"
    return f"{_three(value)} {unit}"


def percent(value: float | None) -> str:
    """Return a part of 1 as per cent: ``"87 %"``."""
    value = number(value)
    if value is None:
        return MISSING
    return f"{100 * value:.0f} %" if abs(value) >= 0.0995 else f"{100 * value:.1f} %"


def slower(value: float | None, than: float | None) -> str:
    """Return by how much a time exceeds another: ``"+12 %"``."""
    value, than = number(value), number(than)
    if value is None or not than:
        return MISSING
    share = 100 * (value / than - 1)
    if share >= 100:
        return f"{value / than:.1f} ×"
    return f"{share:+.1f} %" if abs(share) < 9.95 else f"{share:+.0f} %"


def gain(value: float | None, over: float | None) -> str:
    """Return how many times as long a time is as another: ``"1.04 ×"``."""
    value, over = number(value), number(over)
    return f"{_three(value / over)} ×" if value is not None and over else MISSING


def count(value: int) -> str:
    """Return an integer with its thousands apart."""
    return f"{value:,}"


def times(value: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``"1 row"``, ``"64 rows"``."""
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"


def _three(value: float) -> str:
    """Return three digits, without an exponent."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}"
