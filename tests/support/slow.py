"""Which cases of a parametrised test are quick, where each repeats the others at its own cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int = 4) -> list[Any]:
    """Return cases of which one in `every` stays quick: the first, and so on."""
    return [_slow(case) if n % every else case for n, case in enumerate(cases)]


def quick_if(is_quick: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """Return cases of which those stay quick that `is_quick` takes."""
    return [case if is_quick(case) else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if type(case) is tuple else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
