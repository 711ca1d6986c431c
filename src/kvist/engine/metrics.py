"""Counters and timings. Each means what the line that declares it says; the engine's only clock ticks here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timing:
    """Seconds of the clock at the marks of one request; None until reached."""

    submitted: float
    started: float | None = None  # the step that first ran some of its tokens began
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from submit to the first token, queueing included."""
        return None if self.first_token is None else self.first_token - self.submitted

    @property
    def prefill_s(self) -> float | None:
        """Seconds from the first step to the first token, queueing left out."""
        if self.first_token is None or self.started is None:
            return None
        return self.first_token - self.started

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the last."""
        if self.first_token is None or self.last_token is None:
            return None
        return self.last_token - self.first_token


@dataclass(slots=True)
class Metrics:
    """Totals since the engine was made; they only grow."""

    clock: Callable[[], float] = time.perf_counter
    steps: int = 0  # committed steps
    prompt_tokens: int = 0  # tokens of submitted prompts
    generated_tokens: int = 0  # sampled tokens, end tokens included
    cached_tokens: int = 0  # prompt tokens whose rows were found in the cache
    projections: int = 0  # tokens put through the layers, each time one is
    projections_without_cache: int = 0  # sum, over sampled tokens, of the tokens each was predicted from
    finished: Counter[str] = field(default_factory=Counter)  # ended requests of each finish reason
    step_seconds: float = 0.0  # time inside committed steps
