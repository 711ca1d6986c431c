"""A measured rate: several repeats, of which the middle one stands for all and the extremes show the noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvist.base.errors import UsageError

Clock = Callable[[], float]  # seconds; only differences count


@dataclass(frozen=True, slots=True)
class Rate:
    """What was measured ``repeats`` times, and ``limit``, what could at most be: all in one unit."""

    median: float
    lowest: float
    highest: float
    repeats: int
    limit: float | None = None

    @property
    def of_limit(self) -> float | None:
        """The median as a part of the limit; None without one."""
        return self.median / self.limit if self.limit else None

    def json(self, unit: str) -> dict[str, Any]:
        """``{unit: median, min, max, repeats, limit, of_limit}``."""
        return {
            unit: self.median,
            "min": self.lowest,
            "max": self.highest,
            "repeats": self.repeats,
            "limit": self.limit,
            "of_limit": self.of_limit,
        }


def rate(values: Sequence[float], limit: float | None = None) -> Rate:
    """The rate of at least one repeat; UsageError for none."""
    if not values:
        raise UsageError("a rate of no repeats is none: measure at least once")
    return Rate(median(values), min(values), max(values), len(values), limit)


def repeat(action: Callable[[], object], amount: float, clock: Clock, repeats: int, seconds: float) -> list[float]:
    """``amount`` per second of ``action``, once for each repeat, each at least ``seconds`` long and run at least once.

    The first run is not counted: it pages in what is read and fills caches.
    """
    begin = clock()
    action()
    calls = max(1, int(seconds / max(clock() - begin, 1e-9)))
    found = []
    for _ in range(repeats):
        begin = clock()
        for _ in range(calls):
            action()
        found.append(amount * calls / max(clock() - begin, 1e-9))
    return found
