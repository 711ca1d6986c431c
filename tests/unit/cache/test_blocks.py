from __future__ import annotations

import pytest

from kvist.base.errors import CacheError, OutOfBlocks, UsageError
from kvist.cache.blocks import BlockPool


def test_order_is_first_in_first_out() -> None:
    pool = BlockPool(4)
    assert pool.reserve(3) == [0, 1, 2]
    pool.release([1])
    pool.release([0])
    assert pool.free_ids() == (3, 1, 0)
    assert pool.reserve(2) == [3, 1]


def test_reserving_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    pool.reserve(1)
    with pytest.raises(OutOfBlocks, match="3 blocks are needed and 2 of 3 are free; none was reserved"):
        pool.reserve(3)
    assert (pool.num_free, pool.num_used, pool.free_ids()) == (2, 1, (1, 2))
    assert pool.reserve(0) == []


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    pool = BlockPool(2)
    ids = pool.reserve(2)
    pool.share(ids)
    assert pool.release(ids) == 0
    assert pool.num_free == 0
    assert pool.release([ids[0]]) == 1
    assert pool.free_ids() == (0,)


def test_a_free_block_cannot_be_shared_or_pinned() -> None:
    pool = BlockPool(2)
    (held,) = pool.reserve(1)
    for act in (pool.share, pool.pin):
        with pytest.raises(CacheError, match="block 1 cannot be"):
            act([held, 1])
    assert (pool.refs(held), pool.pins(held)) == (1, 0)


def test_a_double_free_changes_nothing() -> None:
    pool = BlockPool(3)
    first, second = pool.reserve(2)
    with pytest.raises(CacheError, match="block 0 is released 2 times but has 1 references"):
        pool.release([second, first, first])
    assert (pool.refs(first), pool.refs(second), pool.num_free) == (1, 1, 1)
    pool.release([first])
    with pytest.raises(CacheError, match="released before"):
        pool.release([first])
    assert pool.num_free == 2


def test_a_pinned_block_outlives_its_holders() -> None:
    pool = BlockPool(1)
    ids = pool.reserve(1)
    pool.pin(ids)
    assert pool.release(ids) == 0
    with pytest.raises(OutOfBlocks):
        pool.reserve(1)
    assert pool.unpin(ids) == 1
    assert pool.reserve(1) == [0]
    with pytest.raises(CacheError, match="unpinned 1 times but has 0 pins"):
        pool.unpin(ids)


def test_on_free_hears_each_freed_block_once() -> None:
    heard: list[list[int]] = []
    pool = BlockPool(3, on_free=lambda ids: heard.append(list(ids)))
    ids = pool.reserve(3)
    pool.share([ids[1]])
    pool.release(reversed(ids))
    pool.release([ids[1]])
    assert heard == [[2, 0], [1]]


@pytest.mark.parametrize("block", [-1, 3])
def test_unknown_blocks_are_refused(block: int) -> None:
    pool = BlockPool(3)
    for act in (pool.share, pool.release, pool.pin, pool.unpin):
        with pytest.raises(CacheError, match=f"block {block} does not exist: the pool has blocks 0 to 2"):
            act([block])


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(UsageError):
        BlockPool(-1)
    with pytest.raises(UsageError):
        BlockPool(1).reserve(-1)
