"""Prefill, decode and batches through the engine as ``kvist.load`` makes it, with a clock beside it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from kvist.base.errors import UsageError
from kvist.compose import LLM
from kvist.engine.request import Request, Sampling
from kvist.measure.rate import Clock


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that came in a row, the seconds they took, and the mean number of keys that each of them saw."""

    tokens: int
    seconds: float
    depth: float

    @property
    def tok_s(self) -> float:
        """Tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)


Windows = Generator[Window, None, None]  # to be closed: that ends its requests
OWN_TOKENS = 8  # what follows a shared prefix in each prompt


class Prompts:
    """Prompts of English prose that every Python carries. No two begin alike, so that no engine can reuse a prefix."""

    def __init__(self, llm: LLM, longest: int) -> None:
        """Enough text for a prompt of ``longest`` tokens; repeated where it is short."""
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
        self._ids = llm.tokenizer.encode(text[: max(20_000, 8 * longest)])
        if not self._ids:
            raise UsageError("this tokenizer makes no token of English text: nothing can be measured with it")
        self._used: set[tuple[int, ...]] = set()
        self._next = 0

    def take(self, tokens: int) -> list[int]:
        """A prompt of ``tokens`` tokens whose first sixteen began none before."""
        size, start = len(self._ids), self._next
        for at in range(start, start + size):
            head = tuple(self._ids[(at + i) % size] for i in range(min(16, tokens)))
            if head not in self._used:
                break
        self._used.add(head)
        self._next = (at + 37) % size
        return [self._ids[(at + i) % size] for i in range(tokens)]


def prefill(llm: LLM, prompts: Prompts, tokens: int, clock: Clock) -> Window:
    """One prompt of ``tokens`` tokens, from submission to its first token."""
    prompt = prompts.take(tokens)
    begin = clock()
    request = llm.engine.submit(prompt, Sampling(max_tokens=1, ignore_eos=True))
    while not request.finished:
        llm.engine.step()
    return Window(tokens, clock() - begin, (tokens + 1) / 2)


def decode(llm: LLM, prompts: Prompts, depth: int, tokens: int, clock: Clock) -> Windows:
    """One request on a prompt of ``depth`` tokens (at least one): windows of ``tokens`` tokens, as many as asked."""
    room = _room(llm, max(depth, 1))
    request = llm.engine.submit(prompts.take(max(depth, 1)), Sampling(max_tokens=room, ignore_eos=True))
    yield from _windows(llm, [request], tokens, clock)


def batch(
    llm: LLM, prompts: Prompts, requests: int, depth: int, tokens: int, clock: Clock, *, shared: bool, most: int
) -> Windows:
    """``requests`` requests at once, each on a prompt of ``depth`` tokens: windows of ``tokens`` steps.

    ``shared``: the prompts are one and the same prefix of ``depth`` tokens, then a few of their own. The first request
    is under way before the others come, as when users arrive one after the other. Counted is what comes once all have
    their first token. ``most``: tokens that a request may give before the measurement is over.
    """
    sampling = Sampling(max_tokens=most, ignore_eos=True)
    prefix = prompts.take(depth) if shared else []
    running: list[Request] = []
    for _ in range(requests):
        prompt = [*prefix, *prompts.take(OWN_TOKENS)] if shared else prompts.take(depth)
        running.append(llm.engine.submit(prompt, sampling))
        while shared and not running[0].generated:
            llm.engine.step()
    yield from _windows(llm, running, tokens, clock)


def _room(llm: LLM, depth: int) -> int:
    assert llm.setup is not None
    return llm.setup.ctx_size - depth


def _windows(llm: LLM, requests: Sequence[Request], steps: int, clock: Clock) -> Windows:
    """Run ``requests`` until all have a first token, then in windows of ``steps`` steps; ends them when closed."""
    engine = llm.engine
    try:
        while not all(request.generated for request in requests):
            if any(request.finished for request in requests):
                raise UsageError("a request ended before all had their first token: the pool or the context is small")
            engine.step()
        while True:
            before = sum(len(request.generated) for request in requests)
            begin = clock()
            keys = 0
            for _ in range(steps):
                keys += sum(request.length for request in requests)
                engine.step()
            seconds = clock() - begin
            if any(request.finished for request in requests):
                return
            tokens = sum(len(request.generated) for request in requests) - before
            yield Window(tokens, seconds, keys / (steps * len(requests)))
    finally:
        for request in requests:
            engine.abort(request.id)
