"""Users sized by a distribution of lengths instead of by the longest one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvist.base.errors import Corrupt, UsageError
from kvist.plan.engines.base import Engine

_MOST = 2**31
_Z99 = 2.3263478740408408  # one-sided 99 % point of the normal distribution


@dataclass(frozen=True, slots=True)
class LengthPlan:
    """Requests whose lengths are drawn from a file. Bytes are allocated ones, per request.

    ``users_on_average``: as many as the mean allows. ``users_at_99``: as many as fit in 99 % of moments, taking lengths
    as independent.
    """

    count: int
    mean_length: float
    p50: int
    p95: int
    p99: int
    longest: int
    mean_bytes: float
    deviation_bytes: float
    users_on_average: int | None
    users_at_99: int | None


def read_lengths(path: Path) -> list[int]:
    """Lengths in tokens: one per line (the first column counts), or a JSON list. UsageError names the bad line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Corrupt(f"{path} is not text: {error}") from error
    items: list[tuple[str, object]]
    if text.lstrip().startswith("["):
        try:
            items = [(f"item {i}", value) for i, value in enumerate(json.loads(text))]
        except ValueError as error:
            raise Corrupt(f"{path} is not a JSON list: {error}") from error
    else:
        lines = [(f"line {n}", line.replace(",", " ").split()) for n, line in enumerate(text.splitlines(), 1)]
        items = [(where, parts[0]) for where, parts in lines if parts and not parts[0].startswith("#")]
        if items and not str(items[0][1]).isdigit():
            items = items[1:]  # A heading.
    lengths = []
    for where, value in items:
        number = int(value) if isinstance(value, str) and value.isdigit() else value
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < _MOST:
            raise UsageError(f"{path}, {where}: {value!r} is no length; use whole numbers from 1 to {_MOST - 1}")
        lengths.append(number)
    if not lengths:
        raise UsageError(f"{path} holds no lengths")
    return lengths


def plan_lengths(engine: Engine, lengths: Sequence[int], available: int | None) -> LengthPlan:
    """Size ``engine`` for requests of ``lengths``; ``available`` bytes are there for K and V."""
    ordered = sorted(lengths)
    costs = {length: engine.allocated(length, 1) for length in set(ordered)}
    mean = sum(costs[length] for length in ordered) / len(ordered)
    deviation = math.sqrt(sum((costs[length] - mean) ** 2 for length in ordered) / len(ordered))
    return LengthPlan(
        count=len(ordered),
        mean_length=sum(ordered) / len(ordered),
        p50=_percentile(ordered, 0.50),
        p95=_percentile(ordered, 0.95),
        p99=_percentile(ordered, 0.99),
        longest=ordered[-1],
        mean_bytes=mean,
        deviation_bytes=deviation,
        users_on_average=None if available is None or mean == 0 else int(available // mean),
        users_at_99=None if available is None or mean == 0 else _users(available, mean, deviation),
    )


def _percentile(ordered: Sequence[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _users(available: int, mean: float, deviation: float) -> int:
    """The largest n with n * mean + z * deviation * sqrt(n) <= available."""
    root = (-_Z99 * deviation + math.sqrt((_Z99 * deviation) ** 2 + 4 * mean * available)) / (2 * mean)
    return int(root * root) if root > 0 else 0
