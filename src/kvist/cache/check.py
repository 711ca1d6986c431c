"""Recompute every count of the cache from scratch and compare: what must hold between any two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvist.base.errors import CacheError
from kvist.cache.blocks import BlockPool
from kvist.cache.layout import Group
from kvist.cache.table import GONE, Table


def check(
    groups: Sequence[Group],
    pools: Sequence[BlockPool],
    tables: Iterable[Table],
    others: Sequence[Iterable[int]] | None = None,
) -> None:
    """Compare pools and tables; CacheError names the first difference.

    ``tables`` are all tables over these pools. ``others[g]`` are the blocks of group g that anything else holds, once
    for each reference.
    """
    tables = list(tables)
    for table in tables:
        for group in groups:
            _check_table(table, group)
    for index, (group, pool) in enumerate(zip(groups, pools, strict=True)):
        expected: Counter[int] = Counter()
        for table in tables:
            expected.update(table.held(group.index))
        if others is not None:
            expected.update(others[index])
        _check_pool(group, pool, expected)


def _check_pool(group: Group, pool: BlockPool, expected: Counter[int]) -> None:
    free = pool.free_ids()
    _equal(len(set(free)), len(free), f"group {group.index}: a block stands twice in the free list")
    _equal(pool.num_free + pool.num_used, pool.num_blocks, f"group {group.index}: free and used blocks")
    for block in expected:
        if not 0 <= block < pool.num_blocks:
            raise CacheError(f"group {group.index}: a table names block {block}, which does not exist")
    listed = set(free)
    for block in range(pool.num_blocks):
        where = f"group {group.index}, block {block}"
        _equal(pool.refs(block), expected[block], f"{where}: references")
        if pool.pins(block) < 0:
            raise CacheError(f"{where}: {pool.pins(block)} pins")
        idle = pool.refs(block) == 0 and pool.pins(block) == 0
        _equal(block in listed, idle, f"{where}: being in the free list")


def _check_table(table: Table, group: Group) -> None:
    entries, size, where = table.entries(group.index), group.block_size, f"group {group.index}"
    start, written, length = table.start(group.index), table.written, table.length
    if not 0 <= start <= written <= length:
        raise CacheError(f"{where}: start {start}, written {written} and length {length} are not in this order")
    _equal(table.resident(group.index), written - start, f"{where}: resident rows")
    _equal(len(entries), -(-length // size), f"{where}: table entries for {length} positions")
    if start > group.first_needed(written):
        raise CacheError(
            f"{where}: rows before {start} are gone, but the next query sees from {group.first_needed(written)} on"
        )
    sinks = group.ring.sink_blocks if group.ring else 0
    for index, block in enumerate(entries):
        _equal(block == GONE, sinks <= index < start // size, f"{where}, entry {index}: being given back")
    stored = [block for block in entries if block != GONE]
    _equal(len(set(stored)), len(stored), f"{where}: different blocks in the table")
    if group.ring:
        held = table.held(group.index)
        _equal(len(held), group.ring.num_blocks if length else 0, f"{where}: blocks of the ring")
        for index, block in enumerate(entries):
            if block != GONE:
                _equal(block, held[group.ring.block(index)], f"{where}, entry {index}: the ring's block")


def _equal(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise CacheError(f"{what}: found {found}, recomputed {expected}")
