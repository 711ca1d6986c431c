"""Taking turns: what else a machine does then falls on all contenders alike."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter


def in_turns(actions: dict[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of one call of each action, once for each round; an action is called for about ``seconds`` at a time."""
    calls: dict[str, int] = {}
    for name, action in actions.items():
        action()
        begin = perf_counter()
        action()
        calls[name] = max(1, int(seconds / max(perf_counter() - begin, 1e-9)))
    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            begin = perf_counter()
            for _ in range(calls[name]):
                action()
            found[name].append((perf_counter() - begin) / calls[name])
    return found
