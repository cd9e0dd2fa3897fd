"""Timing by the host's clock: calls that run on, contenders in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

WARMUP = 5

Who = TypeVar("Who", bound=Hashable)
Found = TypeVar("Found")


def seconds(call: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def host_and_device(
    call: Callable[[], Any], sync: Callable[[], Any], calls: int, repeats: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of a call until the host may go on, and until the device is done."""
    for _ in range(WARMUP):
        call()
    host, device = [], []
    for _ in range(repeats):
        sync()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        host.append((time.perf_counter() - began) / calls)
        sync()
        device.append((time.perf_counter() - began) / calls)
    return host, device


def in_turn(
    timers: Mapping[Who, Callable[[int], list[Found]]],
    rounds: int,
    again: Callable[[Who, Mapping[Who, list[Found]]], bool] = lambda *_: True,
    found: dict[Who, list[Found]] | None = None,
) -> dict[Who, list[Found]]:
    """Return the times of all contenders, who take turns.

    Whatever else runs on the machine slows down a stretch of time, which is then one round of many
    contenders and not every run of one.

    Parameters
    ----------
    timers : mapping to callable
        Times a contender, in a round of this number.
    rounds : int
        How often each has its turn.
    again : callable
        Tells whether a contender is timed once more, by the times so far.
    found : dict, optional
        Gets the times, turn by turn, so that those of an interrupted run are not lost.
    """
    found = {} if found is None else found
    found |= {who: [] for who in timers}
    for number in range(rounds):
        for who, timer in timers.items():
            if not found[who] or again(who, found):
                found[who] += timer(number)
    return found
