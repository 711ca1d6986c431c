"""B47, below the engine: whatever the requests did, every block comes back, and 200 requests are like 1."""

from __future__ import annotations

import random

import pytest

from kvist.base.dtypes import FLOAT32
from kvist.base.errors import OutOfBlocks
from kvist.cache.addressing import Paged
from kvist.cache.blocks import BlockPool
from kvist.cache.check import check
from kvist.cache.layout import Group, Layout
from kvist.cache.rows import KeyValue
from kvist.cache.table import Table


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("requests", [1, 200])
def test_every_block_comes_back(block_size: int, requests: int) -> None:
    layout = Layout(KeyValue(1, 4, 4), FLOAT32, Paged(block_size))
    groups = (Group(0, (0,), layout), Group(1, (1,), layout, 10))
    pools = [BlockPool(40), BlockPool(40)]
    dice, running = random.Random(7), []
    for _ in range(requests):
        table = Table(groups, pools)
        running.append(table)
        for _ in range(dice.randrange(6)):
            try:
                table.extend(n := dice.randrange(1, 9))
            except OutOfBlocks:
                running.pop(0).release()
                break
            if dice.random() < 0.2:
                break  # aborted between reserving and writing
            table.commit(n)
            table.give_back()
        if len(running) > 3:
            victim = running.pop(dice.randrange(len(running)))
            victim.release()
            victim.release()
        check(groups, pools, running)
    for table in running:
        table.release()
    check(groups, pools, [])
    assert [(pool.num_free, pool.num_used) for pool in pools] == [(40, 0), (40, 0)]
    assert all(pool.refs(b) == pool.pins(b) == 0 for pool in pools for b in range(40))
