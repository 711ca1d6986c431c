"""A real model run operation by operation, with a clock beside it: where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from kvist.base.dtypes import BFLOAT16, FLOAT32
from kvist.base.errors import TooLong, UsageError
from kvist.cache.layout import groups_of
from kvist.cache.pool import Pool
from kvist.cache.sizing import BLOCK_SIZE, STEP_TOKENS, blocks_for
from kvist.cache.table import Table
from kvist.compose import open_model
from kvist.kernels.dispatch import choose
from kvist.kernels.ops import Attend, Combine, Op, Route, Step
from kvist.learn.book import prose
from kvist.model.decoder import Decoder
from kvist.model.weights import load_weights, require_memory
from kvist.spec.source import resolve

PARTS = ("projections", "attention", "feed forward", "head and rest")


class StepTimer:
    """One request of English prose through a model, fed in steps whose operations are timed one by one.

    ``length`` tokens are in the cache. ``logits`` ``[vocab]`` of the newest token are those of the last step.
    """

    def __init__(
        self,
        model: str,
        *,
        ctx_size: int = 4096,
        step_tokens: int = STEP_TOKENS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Load ``model`` with a cache of ``ctx_size`` tokens. Raises what ``kvist.load`` raises for the model."""
        source = resolve(model)
        spec, checkpoint, tokenizer = open_model(source)
        if not 1 <= ctx_size <= spec.max_position:
            raise UsageError(f"ctx_size is {ctx_size}, but this model was made for 1 to {spec.max_position} positions")
        backend = choose().backend
        dtype = FLOAT32 if spec.dtype == FLOAT32.name or backend.name == "reference" else BFLOAT16
        require_memory(spec, dtype, source.name)
        self._groups = groups_of(spec, dtype, BLOCK_SIZE)
        pool = Pool(self._groups, blocks_for(self._groups, ctx_size, step_tokens))
        weights = load_weights(spec, checkpoint, backend, dtype)
        self._decoder = Decoder(
            spec, weights, backend, pool, max_positions=ctx_size, max_tokens=step_tokens, max_rows=1
        )
        self._table = Table(self._groups, pool.blocks)
        self._ids = tokenizer.encode(prose()[: ctx_size * 12])[:ctx_size]
        if len(self._ids) < ctx_size:
            raise UsageError(f"the text gives {len(self._ids)} tokens: use a ctx_size of at most that")
        self._clock = clock
        self.ctx_size, self.step_tokens = ctx_size, step_tokens
        self.logits = torch.empty(0)

    @property
    def length(self) -> int:
        """Tokens whose keys and values are stored."""
        return self._table.written

    def feed(self, tokens: int = 1) -> dict[str, float]:
        """Run the next ``tokens`` through the layers in one step; seconds by part of the step.

        Parts: ``projections`` (queries, keys, values, and the output of attention), ``attention`` (scores and weighted
        values), ``feed forward``, ``head and rest``. TooLong beyond ``ctx_size`` or ``step_tokens``.
        """
        seconds = dict.fromkeys(PARTS, 0.0)
        step = self._begin(tokens)
        body = self._decoder.body
        for i, op in enumerate(body.ops):
            begin = self._clock()
            body.run_range(step, i, i + 1)
            seconds[_part(op)] += self._clock() - begin
        begin = self._clock()
        logits = self._decoder.logits(step)
        seconds["head and rest"] += self._clock() - begin
        self._end(tokens, logits)
        return seconds

    def feed_whole(self, tokens: int = 1) -> float:
        """The same step in one call, as the engine runs it; its seconds."""
        step = self._begin(tokens)
        begin = self._clock()
        logits = self._decoder.forward(step)
        taken = self._clock() - begin
        self._end(tokens, logits)
        return taken

    def back(self, tokens: int) -> None:
        """Forget the newest ``tokens``. NotResident where a window has dropped what the next step needs."""
        self._table.truncate(self.length - tokens)

    def _begin(self, tokens: int) -> Step:
        first = self.length
        if not 1 <= tokens <= self.step_tokens:
            raise TooLong(f"a step of {tokens} tokens: use 1 to {self.step_tokens}")
        if first + tokens > self.ctx_size:
            raise TooLong(f"{first} + {tokens} tokens exceed the context of {self.ctx_size}: make it larger")
        self._table.extend(tokens)
        return Step(
            torch.tensor(self._ids[first : first + tokens], dtype=torch.int32),
            torch.arange(first, first + tokens, dtype=torch.int32),
            torch.tensor([0, tokens], dtype=torch.int32),
            tuple(torch.tensor([self._table.entries(g.index)], dtype=torch.int32) for g in self._groups),
            torch.tensor([tokens - 1], dtype=torch.int32),
        )

    def _end(self, tokens: int, logits: Tensor) -> None:
        self._table.commit(tokens)
        self._table.give_back()
        self.logits = logits[0].clone()


def _part(op: Op) -> str:
    if isinstance(op, Attend):
        return "attention"
    if op.name.endswith((" qkv", " o", " latents", " queries", " absorb", " values")):
        return "projections"
    if isinstance(op, Route | Combine) or op.name.endswith((" gate up", " up", " down", " router")):
        return "feed forward"
    return "head and rest"
