"""Who runs in the next step, and with how many tokens. Policy only: plain integers in and out, no array, no clock.

First come, first served. A request is admitted when every block it can ever hold at once is free of promises in every
group of layers; so an admitted request never waits for a block, and never takes one from a neighbour. Each step serves
the requests that need one token first, then prefill in chunks, up to a budget of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvist.base.errors import TooLong, UsageError
from kvist.engine.request import Request


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Most stored tokens of one request, most tokens of one step, most running requests."""

    ctx_size: int
    max_tokens: int = 512
    max_num_seqs: int = 16

    def __post_init__(self) -> None:
        """Refuse sizes that cannot make progress."""
        for name in ("ctx_size", "max_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.max_num_seqs > self.max_tokens:
            raise UsageError(
                f"max_num_seqs is {self.max_num_seqs} but a step has room for {self.max_tokens} tokens, and every "
                f"running request needs one of them: lower max_num_seqs to {self.max_tokens} or less"
            )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens at positions ``start`` to ``stop`` (not included) of one request; ``sample``: the next one is wanted."""

    request_id: int
    start: int
    stop: int
    sample: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does. ``idle`` says why nobody runs, ``waiting`` why the first waiting request does not (yet)."""

    chunks: tuple[Chunk, ...] = ()
    admitted: tuple[int, ...] = ()
    idle: str | None = None
    waiting: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens put through the layers."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


class Scheduler:
    """Holds the queue and the promises. ``capacity``: blocks of each group; ``need(n)``: blocks of n tokens in each."""

    def __init__(
        self, settings: SchedulerSettings, capacity: tuple[int, ...], need: Callable[[int], tuple[int, ...]]
    ) -> None:
        """Find the longest request that the blocks can ever hold; UsageError when that is none."""
        self.settings = settings
        self.capacity = capacity
        self._need = need
        self._promised = [0] * len(capacity)
        self._promises: dict[int, tuple[int, ...]] = {}  # of every running request, in order of admission
        self._running: dict[int, Request] = {}
        self._waiting: deque[Request] = deque()
        self.longest = self._longest()  # most tokens of one request that can be stored
        if self.longest < 1:
            raise UsageError(f"the pool's blocks {capacity} hold no token, one needs {need(1)}: give it more memory")

    @property
    def num_running(self) -> int:
        """Requests that hold a promise."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def promised(self) -> tuple[int, ...]:
        """Blocks promised in each group."""
        return tuple(self._promised)

    def limit(self, prompt: int, max_tokens: int | None) -> int:
        """How many tokens a request may produce; TooLong when its prompt can never be stored.

        The last one is only ever read, so it needs no room: a prompt that fills the context still gets one token.
        """
        if prompt > self.longest:
            cause = (
                f"the context holds {self.longest}: shorten the prompt, or raise ctx_size"
                if self.longest == self.settings.ctx_size
                else f"the pool's blocks hold {self.longest} of one request (ctx_size {self.settings.ctx_size}): "
                "shorten the prompt, or give the pool more memory"
            )
            raise TooLong(f"the prompt has {prompt} tokens, {cause}")
        room: int = self.longest - prompt + 1
        return room if max_tokens is None else min(max_tokens, room)

    def add(self, request: Request) -> None:
        """Queue ``request``, whose ``max_new`` came from ``limit``."""
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget ``request``, waiting or running; its promise is free for the next step. Unknown ones are ignored."""
        if self._running.pop(request.id, None) is None:
            self._waiting = deque(other for other in self._waiting if other.id != request.id)
            return
        for group, blocks in enumerate(self._promises.pop(request.id)):
            self._promised[group] -= blocks

    def plan(self, admit: Callable[[Request], None] = lambda request: None) -> StepPlan:
        """The next step. Admits from the queue while budget, places and blocks last; nothing else changes.

        ``admit`` is told of each admitted request before its first chunk is cut: it may find that a beginning of it is
        stored already, and raise ``request.written``.
        """
        budget = self.settings.max_tokens
        chunks: list[Chunk] = []
        # A request with one token to go holds up nobody; sorting is stable, so each kind stays in order of admission.
        for request in sorted(self._running.values(), key=lambda request: request.length - request.written > 1):
            budget = self._schedule(request, budget, chunks)
        admitted: list[int] = []
        waiting = None
        while self._waiting:
            waiting = self._refusal(self._waiting[0], budget)
            if waiting is not None:
                break
            request = self._waiting.popleft()
            self._promise(request)
            admit(request)
            admitted.append(request.id)
            budget = self._schedule(request, budget, chunks)
        idle = None if chunks else waiting or "no request is waiting or running"
        return StepPlan(tuple(chunks), tuple(admitted), idle, waiting)

    def _schedule(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        """Give ``request`` what it needs up to ``budget``; the budget that is left."""
        start, length = request.written, request.length
        stop = min(length, start + budget)
        if stop > start:
            chunks.append(Chunk(request.id, start, stop, sample=stop == length))
        return budget - (stop - start)

    def _refusal(self, request: Request, budget: int) -> str | None:
        """Why ``request`` cannot be admitted in this step; None when it can."""
        if len(self._running) >= self.settings.max_num_seqs:
            return f"all {self.settings.max_num_seqs} places are taken (max_num_seqs)"
        if budget < 1:
            return f"the step's budget of {self.settings.max_tokens} tokens is used up"
        for group, blocks in enumerate(self._lifetime(request)):
            free = self.capacity[group] - self._promised[group]
            if blocks > free:
                return f"request {request.id} needs {blocks} blocks of group {group}, {free} are not promised to others"
        return None

    def _promise(self, request: Request) -> None:
        self._promises[request.id] = self._lifetime(request)
        self._running[request.id] = request
        for group, blocks in enumerate(self._promises[request.id]):
            self._promised[group] += blocks

    def _lifetime(self, request: Request) -> tuple[int, ...]:
        """Most blocks of each group that ``request`` can hold at once; its last token is never stored."""
        return self._need(len(request.prompt_ids) + request.max_new - 1)

    def _longest(self) -> int:
        """The largest n up to ctx_size whose blocks fit, by bisection: need grows with n."""
        low, high = 0, self.settings.ctx_size
        while low < high:
            middle = (low + high + 1) // 2
            if all(blocks <= free for blocks, free in zip(self._need(middle), self.capacity, strict=True)):
                low = middle
            else:
                high = middle - 1
        return low
