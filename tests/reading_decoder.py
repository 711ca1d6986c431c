"""A decoder without weights that really reads a paged cache, so that a wrong slot, table or position changes a token.

It stores each token's id at its slot in every group, and predicts from what it reads back through the block tables: the
visible ids of each group, in order. ``predict`` says the same from the plain list of ids, without any table.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvist.base.dtypes import FLOAT32
from kvist.base.errors import OutOfBlocks
from kvist.cache.addressing import Paged
from kvist.cache.blocks import BlockPool
from kvist.cache.check import check
from kvist.cache.layout import Group, Layout
from kvist.cache.rows import KeyValue
from kvist.engine.engine import Engine, EngineSettings
from kvist.engine.request import Request, Sampling
from kvist.engine.scheduler import SchedulerSettings
from kvist.kernels.ops import Step

VOCAB = 61
EMPTY = -1


def logits_of(visible: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
    """Logits [VOCAB] as a function of the ids that each group sees, in order."""
    key = 0
    for ids in visible:
        key = zlib.crc32(np.asarray(ids, np.int64).tobytes(), key)
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(VOCAB).astype(np.float32) * 3


def predict(ids: Sequence[int], windows: Sequence[int | None]) -> NDArray[np.float32]:
    """Logits after ``ids``, from the list itself."""
    return logits_of([np.array(ids[-(window or len(ids)) :]) for window in windows])


def greedy(prompt: Sequence[int], count: int, windows: Sequence[int | None] = (None,)) -> list[int]:
    """The ``count`` greedy tokens after ``prompt``, from the list itself."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(predict(ids, windows).argmax()))
    return ids[len(prompt) :]


class FailingPool(BlockPool):
    """Fails its ``fail_at``-th reservation of at least one block, counting from 1."""

    fail_at = 0
    calls = 0

    def reserve(self, n: int) -> list[int]:
        if n:
            self.calls += 1
            if self.calls == self.fail_at:
                raise OutOfBlocks("planted")
        return super().reserve(n)


class ReadingDecoder:
    """Stores and reads ids in ``memory[g]`` [N * P]; ``before`` is called before each forward, and may raise."""

    def __init__(self, groups: Sequence[Group], pools: Sequence[BlockPool], max_tokens: int) -> None:
        self.groups = groups
        self.max_tokens = max_tokens
        self.memory = [np.full(p.num_blocks * g.block_size, EMPTY) for g, p in zip(groups, pools, strict=True)]
        self.steps: list[Step] = []
        self.fail_at = 0  # the k-th forward raises, after it has stored its rows
        self.spoil: tuple[int, float] | None = None  # (wanted row, value): overwrite its first logit

    def forward(self, step: Step) -> torch.Tensor:
        self.steps.append(step)
        tokens, positions, starts = (part.numpy() for part in (step.tokens, step.positions, step.starts))
        owner = np.searchsorted(starts, np.arange(len(tokens)), side="right") - 1
        for group, memory in zip(self.groups, self.memory, strict=True):
            memory[self._slots(step, group, owner, positions)] = tokens
        if len(self.steps) == self.fail_at:
            raise RuntimeError("planted")
        logits = np.empty((len(step.rows), VOCAB), np.float32)
        for r, t in enumerate(step.rows.tolist()):
            logits[r] = logits_of([self._visible(step, group, owner[t], positions[t]) for group in self.groups])
        if self.spoil is not None:
            logits[self.spoil[0], 0] = self.spoil[1]
        return torch.from_numpy(logits)

    def _slots(
        self, step: Step, group: Group, owner: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        blocks = step.tables[group.index].numpy()[owner, positions // group.block_size]
        assert (blocks >= 0).all(), "a visible position has no block"
        return blocks.astype(np.int64) * group.block_size + positions % group.block_size

    def _visible(self, step: Step, group: Group, owner: int, position: int) -> NDArray[np.int64]:
        seen = np.arange(group.first_needed(position), position + 1)
        ids: NDArray[np.int64] = self.memory[group.index][self._slots(step, group, np.full(len(seen), owner), seen)]
        assert (ids != EMPTY).all(), "read a slot that nobody wrote"
        return ids


class World:
    """An engine over a ReadingDecoder, with as many groups as ``windows``. Freed slots are emptied."""

    def __init__(
        self,
        windows: Sequence[int | None] = (None,),
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        ctx_size: int = 128,
        max_tokens: int = 16,
        max_num_seqs: int = 8,
        eos: Sequence[int] = (),
        cache: bool = True,
    ) -> None:
        layout = Layout(KeyValue(1, 2, 2), FLOAT32, Paged(block_size))
        self.windows = tuple(windows)
        self.groups = tuple(Group(i, (i,), layout, window) for i, window in enumerate(windows))
        self.pools = tuple(FailingPool(num_blocks, lambda ids, i=i: self._empty(i, ids)) for i in range(len(windows)))
        self.decoder = ReadingDecoder(self.groups, self.pools, max_tokens)
        scheduler = SchedulerSettings(ctx_size, max_tokens, max_num_seqs)
        self.engine = Engine(self.decoder, self.groups, self.pools, EngineSettings(scheduler, frozenset(eos), cache))

    def submit(self, prompt: Sequence[int], max_tokens: int | None = 5, **sampling: object) -> Request:
        return self.engine.submit(prompt, Sampling(max_tokens=max_tokens, **sampling))  # type: ignore[arg-type]

    def drain(self, limit: int = 2000) -> None:
        """Step until nobody is left, checking every count after each step."""
        for _ in range(limit):
            self.check()
            if self.engine.idle:
                return
            self.engine.step()
        raise AssertionError(f"not done after {limit} steps")

    def run(self, *prompts: Sequence[int], max_tokens: int | None = 5, **sampling: object) -> list[list[int]]:
        requests = [self.submit(prompt, max_tokens, **sampling) for prompt in prompts]
        self.drain()
        return [request.generated for request in requests]

    def check(self) -> None:
        check(self.groups, self.pools, self.engine.tables)

    @property
    def free(self) -> list[int]:
        return [pool.num_free for pool in self.pools]

    def _empty(self, group: int, blocks: Sequence[int]) -> None:
        size = self.groups[group].block_size
        for block in blocks:
            self.decoder.memory[group][block * size : (block + 1) * size] = EMPTY
