"""A request: its ids, how to choose the next one, and how it ended. The only mutable record of a conversation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from kvist.base.errors import BadSampling, UsageError
from kvist.engine.metrics import Timing

SEEDS = 1 << 64  # a Philox key word: seeds are 0 .. SEEDS - 1


class Status(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended: ``stop`` (end token or stop string), ``length`` (a limit), ``abort``, ``error``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def _number(name: str, value: object, low: float, high: float, limits: str, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadSampling(f"{name} is {value!r}, not a number: {remedy}")
    if not (math.isfinite(value) and low <= value <= high):
        raise BadSampling(f"{name} is {value}, allowed is {limits}: {remedy}")


def _integer(name: str, value: object, low: int, limits: str, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadSampling(f"{name} is {value!r}, not a whole number: {remedy}")
    if value < low:
        raise BadSampling(f"{name} is {value}, allowed is {limits}: {remedy}")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen, and when to stop.

    Order: logits / temperature; the ``top_k`` likeliest; of these the fewest whose probabilities (renormalised) reach
    ``top_p``; of these the ones at least ``min_p`` times as likely as the likeliest. ``temperature`` 0 takes the
    likeliest, the lowest id on a tie. ``seed`` None draws a fresh seed, which the request reports. ``max_tokens`` None
    goes on until the context is full. ``stop`` strings end the text before their first occurrence; ``ignore_eos`` goes
    on past the model's end tokens.

    Raises BadSampling for a value out of range, or settings of which one would have no effect.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check every value, then the settings against each other."""
        _number("temperature", self.temperature, 0.0, 1e6, "0 to 1e6", "0 is greedy, 1 the model's own distribution")
        if self.top_k is not None:
            _integer("top_k", self.top_k, 0, "0 (off) or more", "leave it out to keep every token")
        if self.top_p is not None:
            _number("top_p", self.top_p, 0.0, 1.0, "above 0, up to 1", "leave it out to keep every token")
            if self.top_p == 0:
                raise BadSampling("top_p is 0, allowed is above 0, up to 1: use temperature 0 for the likeliest token")
        if self.min_p is not None:
            _number("min_p", self.min_p, 0.0, 1.0, "0 to 1", "leave it out to keep every token")
        if self.seed is not None:
            _integer("seed", self.seed, 0, f"0 to {SEEDS - 1}", "leave it out for a fresh one")
            if self.seed >= SEEDS:
                raise BadSampling(f"seed is {self.seed}, allowed is 0 to {SEEDS - 1}: leave it out for a fresh one")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, "1 or more", "leave it out (None) to fill the context")
        self._check_stop()
        if self.temperature == 0:
            # A value that switches its filter off contradicts nothing: clients send those by default.
            idle = (("top_k", self.top_k, 0), ("top_p", self.top_p, 1.0), ("min_p", self.min_p, 0.0))
            for name, value, off in idle:
                if value is not None and value != off:
                    raise BadSampling(
                        f"{name} is {value} while temperature is 0: greedy choice takes the likeliest token whatever "
                        f"{name} says; leave {name} out, or set a temperature above 0"
                    )

    def _check_stop(self) -> None:
        listed = isinstance(self.stop, tuple | list)
        if not listed or not all(isinstance(text, str) for text in self.stop):
            raise BadSampling(f"stop is {self.stop!r}: give a tuple of strings")
        if not isinstance(self.stop, tuple):
            object.__setattr__(
                self, "stop", tuple(self.stop)
            )  # a caller's list must not change under a running request
        if "" in self.stop:
            raise BadSampling("stop holds an empty string, which every text contains: leave it out")

    @property
    def greedy(self) -> bool:
        """Whether no random number is needed."""
        return self.temperature == 0


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and what was generated after it. Only the engine's commit writes to it.

    ``max_new`` is how many tokens it may still produce in all, fixed at submit. ``length`` tokens exist, the rows of
    ``written`` are (when it ended: were) stored: the last sampled token is in the ids and not in the cache until a
    later step puts it through the layers, and ``unwritten`` are the ids that must be fed again to go on.
    """

    id: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    max_new: int
    stop_ids: frozenset[int]
    timing: Timing
    generated: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    written: int = 0  # what its table says; commit keeps them equal
    cached_tokens: int = 0  # prompt tokens whose rows were found in the cache and not computed again
    projections: int = 0  # tokens put through the layers for this request, recomputed ones counted each time
    projections_without_cache: int = 0  # sum, over its produced tokens, of the tokens they were predicted from

    def __post_init__(self) -> None:
        """Refuse what could never run."""
        if not self.prompt_ids:
            raise UsageError("the prompt holds no token: give at least one (with a BOS token even an empty text works)")

    @property
    def length(self) -> int:
        """Tokens the request has: prompt and generated ones."""
        return len(self.prompt_ids) + len(self.generated)

    @property
    def finished(self) -> bool:
        """Whether it ended, for whatever reason."""
        return self.status is Status.FINISHED

    @property
    def unwritten(self) -> tuple[int, ...]:
        """The ids whose rows are not stored."""
        return tuple(self.ids(self.written, self.length))

    def ids(self, start: int, stop: int) -> list[int]:
        """Tokens at positions ``start`` to ``stop`` (not included), without copying the rest."""
        prompt = len(self.prompt_ids)
        if start >= prompt:
            return self.generated[start - prompt : stop - prompt]
        if stop <= prompt:
            return list(self.prompt_ids[start:stop])
        return [*self.prompt_ids[start:], *self.generated[: stop - prompt]]

    def ending(self, token: int) -> FinishReason | None:
        """How the request ends if ``token`` comes next; None when it goes on."""
        if token in self.stop_ids:
            return FinishReason.STOP
        if len(self.generated) + 1 >= self.max_new:
            return FinishReason.LENGTH
        return None
