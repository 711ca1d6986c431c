"""The loop: submit, abort, step, commit. Knows ids, never text.

A step is all or nothing: it plans, reserves, runs and samples first, and only then ``_commit`` writes, in one place. If
anything raises before that, no request, count or id has changed, and the same step can be tried again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvist.base.errors import KernelError, UsageError
from kvist.cache.blocks import BlockPool
from kvist.cache.layout import Group
from kvist.cache.sizing import blocks_for
from kvist.cache.table import Table
from kvist.engine import batch
from kvist.engine.kept import Kept
from kvist.engine.metrics import Metrics, Timing
from kvist.engine.request import FinishReason, Request, Sampling, Status
from kvist.engine.runner import Forward, Runner
from kvist.engine.sampler import fresh_seed, sample
from kvist.engine.scheduler import Chunk, Scheduler, SchedulerSettings, StepPlan


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """``cache`` False keeps nothing: every token recomputes its whole request, as a model without a cache would.

    ``keep``: finished requests stay in the pool while nobody needs their blocks, so that a request that begins like one
    of them (or like a running one) starts with its rows.
    """

    scheduler: SchedulerSettings
    eos_token_ids: frozenset[int] = frozenset()
    cache: bool = True
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """What one step did to one request: a new ``token``, an end, or both."""

    request_id: int
    token: int | None
    finish_reason: FinishReason | None


class Engine:
    """Many requests over one decoder and one pool of blocks. Not thread-safe: one caller at a time."""

    def __init__(
        self, decoder: Forward, groups: Sequence[Group], pools: Sequence[BlockPool], settings: EngineSettings
    ) -> None:
        """Serve ``decoder`` from ``pools[g]``, the blocks of ``groups[g]``. UsageError when settings do not fit."""
        chunk = settings.scheduler.max_tokens
        if chunk > decoder.max_tokens:
            raise UsageError(
                f"a step of {chunk} tokens does not fit the decoder's {decoder.max_tokens}: lower the step's max_tokens"
            )
        self.settings = settings
        self.groups = tuple(groups)
        self.pools = tuple(pools)
        self.scheduler = Scheduler(
            settings.scheduler, tuple(pool.num_blocks for pool in pools), lambda n: blocks_for(self.groups, n, chunk)
        )
        self.metrics = Metrics()
        self._runner = Runner(decoder)
        self._requests: dict[int, Request] = {}  # waiting and running ones; a finished one belongs to its submitter
        self._tables: dict[int, Table] = {}  # of running requests
        self._kept = Kept()
        self._next_id = 0

    @property
    def decoder(self) -> Forward:
        """What the engine runs."""
        return self._runner.decoder

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running."""
        return not self._requests

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables of running and of kept requests, for ``cache.check``."""
        return (*self._tables.values(), *self._kept.tables)

    def forget(self) -> None:
        """Give up what finished requests left in the pool: their blocks are free at once."""
        self._kept.clear()

    def submit(self, prompt_ids: Iterable[int], sampling: Sampling) -> Request:
        """Queue a request and hand it out; its record stays true after it ends. TooLong when it can never fit."""
        prompt = tuple(prompt_ids)
        request = Request(
            id=self._next_id,
            prompt_ids=prompt,
            sampling=sampling,
            seed=_seed(sampling),
            max_new=self.scheduler.limit(len(prompt), sampling.max_tokens),
            stop_ids=frozenset() if sampling.ignore_eos else self.settings.eos_token_ids,
            timing=Timing(self.metrics.clock()),
        )
        self._next_id += 1
        self._requests[request.id] = request
        self.scheduler.add(request)
        self.metrics.prompt_tokens += len(prompt)
        return request

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request now, its blocks free at once; whether there was one to end. Twice or unknown: nothing happens.

        The text layer passes ``stop`` when a stop string has completed.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason)
        return True

    def step(self) -> tuple[Output, ...]:
        """Run one step; what it did to whom. Empty when nobody ran or no token was due."""
        begin = self.metrics.clock()
        plan = self.scheduler.plan(self._admit)
        for request_id in plan.admitted:
            self._requests[request_id].status = Status.RUNNING
            self._requests[request_id].timing.started = begin
        if not plan.chunks:
            return ()
        for chunk in plan.chunks:
            table = self._tables[chunk.request_id]
            # After a step that failed, its places are still reserved.
            self._kept.extend(table, max(0, chunk.stop - table.length))
        rows = iter(self._runner.run(batch.build(plan, self._requests, self._tables)))
        choices = [self._choose(chunk, next(rows)) if chunk.sample else None for chunk in plan.chunks]
        return self._commit(plan, choices, begin)

    def _admit(self, request: Request) -> None:
        """Make the request's table, beginning with rows that a running or kept request already has."""
        table = self._tables[request.id] = Table(self.groups, self.pools)
        if not (self.settings.keep and self.settings.cache):
            return
        # At least the last token is computed: its logits are wanted, and they are not kept.
        running = ((self._requests[i], other) for i, other in self._tables.items() if i != request.id)
        source, n = self._kept.best(request.prompt_ids[:-1], ((r.ids(0, r.written), other) for r, other in running))
        if source is not None:
            table.begin_with(source, n)
            request.written = request.cached_tokens = n
            self.metrics.cached_tokens += n

    def _choose(self, chunk: Chunk, logits: NDArray[np.float32]) -> int | KernelError:
        request = self._requests[chunk.request_id]
        try:
            return sample(logits, request.sampling, request.seed, len(request.generated))
        except KernelError as error:
            return error

    def _commit(self, plan: StepPlan, choices: Sequence[int | KernelError | None], begin: float) -> tuple[Output, ...]:
        """Make the step true. The only place that adds ids to requests and moves the counts of their tables."""
        outputs: list[Output] = []
        now = self.metrics.clock()
        for chunk, choice in zip(plan.chunks, choices, strict=True):
            request, table = self._requests[chunk.request_id], self._tables[chunk.request_id]
            done = chunk.stop - chunk.start
            table.commit(done)
            table.give_back()
            request.written = table.written
            request.projections += done
            self.metrics.projections += done
            if isinstance(choice, KernelError):
                request.error = str(choice)
                self._finish(request, FinishReason.ERROR)
                outputs.append(Output(request.id, None, FinishReason.ERROR))
            elif choice is not None:
                outputs.append(self._append(request, choice, now))
        self.metrics.steps += 1
        self.metrics.step_seconds += now - begin
        return tuple(outputs)

    def _append(self, request: Request, token: int, now: float) -> Output:
        """Add a sampled token, and end the request if that was its last."""
        request.projections_without_cache += request.length
        self.metrics.projections_without_cache += request.length
        ending = request.ending(token)
        request.generated.append(token)
        self.metrics.generated_tokens += 1
        request.timing.last_token = now
        if request.timing.first_token is None:
            request.timing.first_token = now
        if ending is not None:
            self._finish(request, ending)
        elif not self.settings.cache:
            self._tables[request.id].truncate(0)
            request.written = 0
        return Output(request.id, token, ending)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        table = self._tables.pop(request.id, None)
        if table is not None:
            if self.settings.keep and self.settings.cache and reason is not FinishReason.ERROR:
                table.truncate(table.written)
                self._kept.add(request.ids(0, request.written), table)
            else:
                table.release()
        self.scheduler.remove(request)
        del self._requests[request.id]
        if not self.settings.cache:
            request.written = 0
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.timing.ended = self.metrics.clock()
        self.metrics.finished[reason] += 1


def _seed(sampling: Sampling) -> int:
    if sampling.seed is not None:
        return sampling.seed
    return 0 if sampling.greedy else fresh_seed()
