"""The checker is only worth something if it finds what is wrong: every count is damaged once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvist.base.dtypes import FLOAT32
from kvist.base.errors import CacheError
from kvist.cache.addressing import Paged, Ring
from kvist.cache.blocks import BlockPool
from kvist.cache.check import check
from kvist.cache.layout import Group, Layout
from kvist.cache.rows import KeyValue
from kvist.cache.table import Table


def group(index: int, window: int | None, ring: Ring | None = None) -> Group:
    return Group(index, (index,), Layout(KeyValue(1, 4, 4), FLOAT32, ring or Paged(4)), window)


GROUPS = (group(0, None), group(1, 6), group(2, 5, Ring(8, 3, 4, chunk=3)))


def healthy() -> tuple[list[BlockPool], list[Table]]:
    pools = [BlockPool(16) for _ in GROUPS]
    tables = [Table(GROUPS, pools) for _ in range(2)]
    for table, tokens in zip(tables, (19, 5), strict=True):
        for _ in range(tokens):
            table.extend(1)
            table.commit(1)
            table.give_back()
    return pools, tables


def leak(pools: list[BlockPool], _: list[Table]) -> None:
    pools[0].reserve(1)


def lose_reference(pools: list[BlockPool], tables: list[Table]) -> None:
    pools[1]._refs[tables[1].held(1)[0]] = 0


def free_a_held_block(pools: list[BlockPool], tables: list[Table]) -> None:
    pools[0]._free[tables[0].held(0)[0]] = None


def lose_a_free_block(pools: list[BlockPool], _: list[Table]) -> None:
    del pools[2]._free[pools[2].free_ids()[0]]


def negative_pin(pools: list[BlockPool], _: list[Table]) -> None:
    pools[0]._pins[0] = -1


def written_too_far(_: list[BlockPool], tables: list[Table]) -> None:
    tables[0]._written += 1


def length_too_far(_: list[BlockPool], tables: list[Table]) -> None:
    tables[0]._length += 4


def start_too_late(_: list[BlockPool], tables: list[Table]) -> None:
    tables[0]._starts[0] = 4


def start_too_early(_: list[BlockPool], tables: list[Table]) -> None:
    tables[0]._starts[1] -= 4


def entry_gone(_: list[BlockPool], tables: list[Table]) -> None:
    tables[1]._entries[0][1] = -1


def entry_twice(_: list[BlockPool], tables: list[Table]) -> None:
    tables[0]._entries[0][1] = tables[0]._entries[0][0]


def entry_of_another(_: list[BlockPool], tables: list[Table]) -> None:
    tables[0]._entries[0][0] = tables[1]._entries[0][0]


def entry_outside(_: list[BlockPool], tables: list[Table]) -> None:
    tables[0]._entries[0][0] = 99


def ring_out_of_order(_: list[BlockPool], tables: list[Table]) -> None:
    entries = tables[0]._entries[2]
    entries[-1], entries[-2] = entries[-2], entries[-1]


def forgotten_table(_: list[BlockPool], tables: list[Table]) -> None:
    tables.pop()


FAULTS = [
    leak,
    lose_reference,
    free_a_held_block,
    lose_a_free_block,
    negative_pin,
    written_too_far,
    length_too_far,
    start_too_late,
    start_too_early,
    entry_gone,
    entry_twice,
    entry_of_another,
    entry_outside,
    ring_out_of_order,
    forgotten_table,
]


def test_healthy_tables_pass() -> None:
    pools, tables = healthy()
    check(GROUPS, pools, tables)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_each_fault_is_found(fault: Callable[[list[BlockPool], list[Table]], None]) -> None:
    pools, tables = healthy()
    fault(pools, tables)
    with pytest.raises(CacheError, match="group"):
        check(GROUPS, pools, tables)


def test_other_holders_are_counted() -> None:
    pools, tables = healthy()
    extra = pools[0].reserve(2)
    pools[0].share(tables[0].held(0)[:1])
    others = [[*extra, tables[0].held(0)[0]], [], []]
    check(GROUPS, pools, tables, others)
    with pytest.raises(CacheError, match="references: found 1, recomputed 0"):
        check(GROUPS, pools, tables, [others[0][1:], [], []])
