"""The k-th reservation of a history fails, for every k: nothing is half reserved, and the history can go on."""

from __future__ import annotations

from itertools import count

import pytest

from kvist.base.dtypes import FLOAT32
from kvist.base.errors import NotResident, OutOfBlocks
from kvist.cache.addressing import Addressing, Paged, Ring
from kvist.cache.blocks import BlockPool
from kvist.cache.check import check
from kvist.cache.layout import Group, Layout
from kvist.cache.rows import KeyValue
from kvist.cache.table import Table


class Failing(BlockPool):
    """A real pool whose k-th reservation, counted over all pools of a history, fails."""

    def __init__(self, num_blocks: int, clock: count[int], k: int | None) -> None:
        super().__init__(num_blocks)
        self.clock, self.k = clock, k

    def reserve(self, n: int) -> list[int]:
        if n and next(self.clock) == self.k:
            raise OutOfBlocks("planted")
        return super().reserve(n)


def group(index: int, window: int | None, addressing: Addressing) -> Group:
    return Group(index, (index,), Layout(KeyValue(1, 4, 4), FLOAT32, addressing), window)


HOUSES = {
    "full, window, full": (group(0, None, Paged(4)), group(1, 6, Paged(4)), group(2, None, Paged(8))),
    "ring between": (group(0, None, Paged(4)), group(1, 5, Ring(8, 3, 4, 5)), group(2, 3, Paged(4))),
}
HISTORY = [(0, 5), (1, 3), (0, 4), (2, 1), (1, 5), (0, -6), (2, 5), (0, 5), (1, 0), (2, 4), (1, 5), (0, 5), (2, 2)]


def state(table: Table, pools: list[Failing]) -> object:
    groups = range(len(pools))
    return (
        (table.length, table.written, [list(table.entries(g)) for g in groups], [table.start(g) for g in groups]),
        [(pool.num_free, sorted(pool.free_ids())) for pool in pools],
    )


def run(groups: tuple[Group, ...], k: int | None) -> tuple[int, int]:
    """(reservations, refusals) of the history."""
    clock = count()
    pools = [Failing(64, clock, k) for _ in groups]
    tables = [Table(groups, pools) for _ in range(3)]
    refusals = 0
    for request, n in HISTORY:
        table = tables[request]
        if n == 0:
            table.release()
        elif n < 0:
            try:
                table.truncate(max(0, table.written + n))
            except NotResident:
                table.release()
        else:
            before = state(table, pools)
            try:
                table.extend(n)
            except OutOfBlocks:
                refusals += 1
                assert state(table, pools) == before
                table.extend(n)
            table.commit(n)
            table.give_back()
        check(groups, pools, tables)
    for table in tables:
        table.release()
    check(groups, pools, tables)
    assert all(pool.num_free == 64 for pool in pools)
    return next(clock), refusals


@pytest.mark.parametrize("house", HOUSES)
def test_every_reservation_fails_once(house: str) -> None:
    reservations, refusals = run(HOUSES[house], None)
    assert (reservations > 10, refusals) == (True, 0)
    for k in range(reservations):
        assert run(HOUSES[house], k)[1] == 1


@pytest.mark.parametrize("house", HOUSES)
def test_an_abort_after_every_call_leaks_nothing(house: str) -> None:
    groups = HOUSES[house]
    for stop in range(3 * 8):
        pools = [BlockPool(64) for _ in groups]
        table, other = Table(groups, pools), Table(groups, pools)
        other.extend(3)
        acts = (table.extend, table.commit, lambda _, table=table: table.give_back())
        for call in range(stop):
            acts[call % 3](4)
        table.release()
        check(groups, pools, [table, other])
        other.release()
        assert all(pool.num_free == 64 for pool in pools)
