"""What every engine's model answers, and the inverse questions, which follow from monotone bytes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvist.plan.cost import LayerKind

LIMIT = 2**40


class Engine(Protocol):
    """Bytes on one rank. ``allocated`` never falls when ``ctx`` or ``sequences`` grows."""

    @property
    def name(self) -> str:
        """As given to ``--engine``."""
        ...

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The layers of one rank."""
        ...

    def allocated(self, ctx: int, sequences: int) -> int:
        """Bytes that ``sequences`` requests of ``ctx`` tokens take, everything rounded as this engine does."""
        ...

    def explain(self, ctx: int, sequences: int) -> tuple[str, ...]:
        """The sum of ``allocated``, one line per step."""
        ...


def max_context(engine: Engine, available: int, sequences: int, limit: int = LIMIT) -> int:
    """The most tokens that each of ``sequences`` requests can have in ``available`` bytes; at most ``limit``."""
    return _largest(lambda ctx: engine.allocated(ctx, sequences) <= available, limit)


def max_sequences(engine: Engine, available: int, ctx: int, limit: int = LIMIT) -> int:
    """The most requests of ``ctx`` tokens that fit into ``available`` bytes; at most ``limit``."""
    return _largest(lambda count: engine.allocated(ctx, count) <= available, limit)


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
