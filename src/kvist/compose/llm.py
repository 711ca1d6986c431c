"""A loaded model with text on both sides: many prompts at once, in whole or in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from types import TracebackType
from typing import Any, overload

from kvist.base.errors import BadSampling, UsageError
from kvist.engine.engine import Engine, Output
from kvist.engine.request import FinishReason, Request, Sampling
from kvist.spec.model import ModelSpec
from kvist.text.stream import TextStream
from kvist.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Setup:
    """What ``load`` decided. Bytes of the cache are what the pool holds: allocated once, zero growth."""

    name: str
    spec: ModelSpec = field(repr=False)
    kernels: str
    refusals: tuple[tuple[str, str], ...]  # kernels passed over, each with its reason
    dtype: str
    kv_cache_dtype: str
    block_size: int
    ctx_size: int
    max_num_seqs: int
    cache: bool
    weight_bytes: int
    cache_bytes: int
    bytes_per_token: int  # of the cache, while no window is full
    kv_window: int | None = None  # bounded memory: the newest keys that a query sees,
    kv_sinks: int = 0  # and the first
    weights: str = ""  # packed, or dtype; dtype is then that of the few matrices that GGUF has not quantised


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one prompt. Rates and times are None when no token came, or only one."""

    text: str
    ids: tuple[int, ...]  # every generated token, an end token included
    finish_reason: str | None  # stop, length, abort, error; None while it runs
    error: str | None
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the cache and not computed again
    seed: int
    projections: int  # tokens put through the layers
    projections_without_cache: int  # the same, had every token recomputed all before it
    ttft_s: float | None
    prefill_s: float | None
    decode_s: float | None

    @property
    def generated_tokens(self) -> int:
        """How many tokens were generated, an end token included."""
        return len(self.ids)

    @property
    def prefill_tok_s(self) -> float | None:
        """Computed prompt tokens per second, from its first step to its first token."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s else None

    @property
    def decode_tok_s(self) -> float | None:
        """Generated tokens per second after the first."""
        return (self.generated_tokens - 1) / self.decode_s if self.decode_s else None


@dataclass(slots=True, eq=False)
class _Feed:
    """One request's text, filled by whoever runs the engine and emptied by its owner."""

    request: Request
    stream: TextStream
    pieces: deque[str]
    text: list[str]
    reason: FinishReason | None = None

    def take(self, output: Output) -> None:
        if output.token is not None and output.token not in self.request.stop_ids:
            self._add(self.stream.push(output.token))
        if self.stream.stopped_by is None and output.finish_reason is not None:
            self._add(self.stream.finish())
        # A stop string that completes on the last token is a stop, not a cut.
        self.reason = output.finish_reason if self.stream.stopped_by is None else FinishReason.STOP

    def end(self, reason: FinishReason) -> None:
        self.reason = reason
        self._add(self.stream.finish())

    def _add(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)
            self.text.append(piece)

    def completion(self) -> Completion:
        request, timing = self.request, self.request.timing
        return Completion(
            text="".join(self.text),
            ids=tuple(request.generated),
            finish_reason=None if self.reason is None else self.reason.value,
            error=request.error,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=request.cached_tokens,
            seed=request.seed,
            projections=request.projections,
            projections_without_cache=request.projections_without_cache,
            ttft_s=timing.ttft_s,
            prefill_s=timing.prefill_s,
            decode_s=timing.decode_s,
        )


class Stream:
    """The text of one request in pieces, as they come. ``close``, or leaving a ``with``, ends it, blocks and all."""

    def __init__(self, llm: LLM, feed: _Feed) -> None:
        """Made by ``LLM.stream``; the request is queued already."""
        self._llm = llm
        self._feed = feed

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._feed.pieces:
            if self._feed.reason is not None:
                raise StopIteration
            self._llm._pump(self._feed)
        return self._feed.pieces.popleft()

    @property
    def completion(self) -> Completion:
        """What there is so far; final once the stream has ended or was closed."""
        return self._feed.completion()

    def close(self) -> None:
        """End the request if it still runs: reason ``abort``. Pieces that were not taken yet can still be."""
        self._llm._abort([self._feed])

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._llm._abandon(self._feed)


class LLM:
    """A loaded model that answers many prompts at once.

    May be used from several threads: whoever needs a token runs the next step for everybody.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, vocab_size: int, setup: Setup | None = None) -> None:
        """Join an engine with the text on both its sides; ``load`` makes both from a path."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.setup = setup
        self._vocab_size = vocab_size
        self._feeds: dict[int, _Feed] = {}
        self._abandoned: deque[_Feed] = deque()
        self._lock = Lock()
        self._closed = False

    @overload
    def generate(self, prompts: str, sampling: Sampling | None = None, **settings: Any) -> Completion: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None, **settings: Any
    ) -> list[Completion]: ...

    def generate(
        self, prompts: str | Sequence[Prompt], sampling: Sampling | None = None, **settings: Any
    ) -> Completion | list[Completion]:
        """Complete one prompt, or many together; a prompt in a list is a text or token ids.

        ``settings`` are the fields of ``Sampling``. Nothing runs unless every prompt is accepted: UsageError for an
        empty one, TooLong for one that the context cannot hold, BadSampling for settings.
        """
        chosen = _sampling(sampling, settings)
        if isinstance(prompts, str):
            return self._complete([self._ids(prompts)], chosen, continuation=True)[0]
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            raise UsageError(f"prompts is {prompts!r}: give a text, or a list of texts"[:200])
        return self._complete([self._ids(prompt) for prompt in prompts], chosen, continuation=True)

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, **settings: Any) -> Stream:
        """Complete ``prompt`` piece by piece. Refuses what ``generate`` refuses, at once."""
        return Stream(self, self._submit(self._ids(prompt), _sampling(sampling, settings), continuation=True))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling: Sampling | None = None, **settings: Any
    ) -> Completion:
        """Answer a conversation ``[{"role": "user", "content": "..."}]``. UsageError for a model without a template."""
        return self._complete(
            [self.tokenizer.encode_chat(messages)], _sampling(sampling, settings), continuation=False
        )[0]

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], sampling: Sampling | None = None, **settings: Any
    ) -> Stream:
        """Answer a conversation piece by piece."""
        ids = self.tokenizer.encode_chat(messages)
        return Stream(self, self._submit(ids, _sampling(sampling, settings), continuation=False))

    def close(self) -> None:
        """End what runs and refuse what comes. The memory goes with the last reference to this object."""
        self._abort(list(self._feeds.values()))
        self._closed = True

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ids(self, prompt: Prompt) -> list[int]:
        if prompt == "":
            raise UsageError("the prompt is empty: give at least one character to continue from")
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, list | tuple) or not all(isinstance(token, int) for token in prompt):
            raise UsageError(f"a prompt is a text or a list of token ids, not {prompt!r}"[:200])
        return list(prompt)

    def _complete(self, prompts: Iterable[list[int]], sampling: Sampling, *, continuation: bool) -> list[Completion]:
        feeds: list[_Feed] = []
        try:
            for ids in prompts:
                feeds.append(self._submit(ids, sampling, continuation=continuation))
            for feed in feeds:
                while feed.reason is None:
                    feed.pieces.clear()  # nobody reads them one by one here
                    self._pump(feed)
        finally:
            self._abort(feeds)
        return [feed.completion() for feed in feeds]

    def _submit(self, ids: list[int], sampling: Sampling, *, continuation: bool) -> _Feed:
        if self._closed:
            raise UsageError("this LLM is closed: load the model again")
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise UsageError(f"token id {token} is not in the model's vocabulary: use 0 to {self._vocab_size - 1}")
        stream = self.tokenizer.stream(sampling.stop, continuation=continuation)
        with self._lock:
            self._sweep()
            request = self.engine.submit(ids, sampling)
            feed = self._feeds[request.id] = _Feed(request, stream, deque(), [])
        return feed

    def _pump(self, feed: _Feed) -> None:
        """Run one step for everybody, unless another thread has brought ``feed`` something meanwhile."""
        with self._lock:
            self._sweep()
            if feed.pieces or feed.reason is not None:
                return
            for output in self.engine.step():
                other = self._feeds[output.request_id]
                other.take(output)
                if other.reason is not None:
                    self.engine.abort(output.request_id, other.reason)  # nothing happens when the engine ended it
                    del self._feeds[output.request_id]

    def _abort(self, feeds: Iterable[_Feed]) -> None:
        with self._lock:
            self._sweep()
            for feed in feeds:
                self._end(feed)

    def _abandon(self, feed: _Feed) -> None:
        """End a feed whose owner is gone. Garbage collection may call this anywhere, even inside a step."""
        self._abandoned.append(feed)
        if self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def _sweep(self) -> None:
        while self._abandoned:
            self._end(self._abandoned.popleft())

    def _end(self, feed: _Feed) -> None:
        if self._feeds.pop(feed.request.id, None) is not None:
            self.engine.abort(feed.request.id)
            feed.end(FinishReason.ABORT)


def _sampling(sampling: Sampling | None, settings: Mapping[str, Any]) -> Sampling:
    if sampling is None:
        unknown = sorted(set(settings) - set(Sampling.__dataclass_fields__))
        if unknown:
            known = ", ".join(Sampling.__dataclass_fields__)
            raise BadSampling(f"unknown setting {', '.join(unknown)}: a request has {known}")
        return Sampling(**settings)
    if settings:
        raise BadSampling(f"{', '.join(settings)} given beside a Sampling record: put it into the record")
    return sampling
