"""Any history of the block pool beside two dictionaries that count references and pins."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvist.base.errors import CacheError, OutOfBlocks
from kvist.cache.blocks import BlockPool

N = 7
IDS = st.lists(st.integers(0, N - 1), max_size=4)


class Blocks(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.pool = BlockPool(N, on_free=self.freed.extend)
        self.refs: Counter[int] = Counter()
        self.pins: Counter[int] = Counter()
        self.order = list(range(N))  # the free list

    def free_idle(self, ids: list[int]) -> list[int]:
        newly = [b for b in dict.fromkeys(ids) if self.refs[b] == 0 and self.pins[b] == 0]
        self.order += newly
        return newly

    @rule(n=st.integers(0, N + 1))
    def reserve(self, n: int) -> None:
        if n > len(self.order):
            with pytest.raises(OutOfBlocks, match=f"{n} blocks are needed and {len(self.order)} of {N}"):
                self.pool.reserve(n)
            return
        taken = self.pool.reserve(n)
        assert taken == self.order[:n]
        del self.order[:n]
        self.refs.update(taken)

    @rule(ids=IDS)
    def share(self, ids: list[int]) -> None:
        if any(self.refs[b] == 0 for b in ids):
            with pytest.raises(CacheError):
                self.pool.share(ids)
        else:
            self.pool.share(ids)
            self.refs.update(ids)

    @rule(ids=IDS)
    def release(self, ids: list[int]) -> None:
        self.freed.clear()
        if any(self.refs[b] < n for b, n in Counter(ids).items()):
            with pytest.raises(CacheError):
                self.pool.release(ids)
            assert not self.freed
            return
        self.refs.subtract(ids)
        newly = self.free_idle(ids)
        assert self.pool.release(ids) == len(newly)
        assert self.freed == newly

    @rule(ids=IDS)
    def pin(self, ids: list[int]) -> None:
        if any(self.refs[b] == 0 and self.pins[b] == 0 for b in ids):
            with pytest.raises(CacheError):
                self.pool.pin(ids)
        else:
            self.pool.pin(ids)
            self.pins.update(ids)

    @rule(ids=IDS)
    def unpin(self, ids: list[int]) -> None:
        if any(self.pins[b] < n for b, n in Counter(ids).items()):
            with pytest.raises(CacheError):
                self.pool.unpin(ids)
            return
        self.pins.subtract(ids)
        assert self.pool.unpin(ids) == len(self.free_idle(ids))

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.free_ids() == tuple(self.order)
        assert self.pool.num_free + self.pool.num_used == N
        assert [self.pool.refs(b) for b in range(N)] == [self.refs[b] for b in range(N)]
        assert [self.pool.pins(b) for b in range(N)] == [self.pins[b] for b in range(N)]


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlocks = Blocks.TestCase
