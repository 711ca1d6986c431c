"""Any history of several requests over full, window and ring groups, beside plain lists of tokens.

``memory`` stands for the pool's bytes: a row is written where the table says, and freeing a block erases it. Whatever
happens, every row that a request's next token would see must still be the one that this request wrote there.
"""

from __future__ import annotations

from functools import partial
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvist.base.dtypes import FLOAT32
from kvist.base.errors import NotResident, OutOfBlocks
from kvist.cache.addressing import Addressing, Paged, Ring
from kvist.cache.blocks import BlockPool
from kvist.cache.check import check
from kvist.cache.layout import Group, Layout
from kvist.cache.rows import KeyValue
from kvist.cache.table import GONE, Table

CHUNK = 5


def group(index: int, window: int | None, addressing: Addressing) -> Group:
    return Group(index, (index,), Layout(KeyValue(1, 4, 4), FLOAT32, addressing), window)


HOUSES = {
    "full and window": (group(0, None, Paged(4)), group(1, 6, Paged(4))),
    "window first": (group(0, 5, Paged(8)), group(1, None, Paged(4))),
    "windows only": (group(0, 1, Paged(4)), group(1, 4, Paged(1)), group(2, 9, Paged(4))),
    "ring": (group(0, 5, Ring(8, 3, 4, CHUNK)), group(1, None, Paged(8)), group(2, 4, Ring(4, 0, 4, CHUNK))),
}
Row = tuple[int, int]  # (request, token): unlike any other row ever written


class Tables(RuleBasedStateMachine):
    @initialize(house=st.sampled_from(sorted(HOUSES)), blocks=st.integers(4, 14))
    def build(self, house: str, blocks: int) -> None:
        self.groups = HOUSES[house]
        self.memory: list[dict[tuple[int, int], Row]] = [{} for _ in self.groups]
        self.pools = [BlockPool(blocks, on_free=partial(self.erase, g)) for g in range(len(self.groups))]
        self.requests: dict[int, tuple[Table, list[Row]]] = {}
        self.ids, self.tokens = count(), count()

    def erase(self, g: int, ids: list[int]) -> None:
        for key in [key for key in self.memory[g] if key[0] in ids]:
            del self.memory[g][key]

    def write(self, table: Table, position: int, row: Row) -> None:
        for g, grp in enumerate(self.groups):
            index, slot = divmod(position, grp.block_size)
            assert table.entries(g)[index] != GONE
            self.memory[g][table.entries(g)[index], slot] = row

    def read(self, table: Table, g: int, position: int) -> Row | None:
        index, slot = divmod(position, self.groups[g].block_size)
        block = table.entries(g)[index]
        return None if block == GONE else self.memory[g].get((block, slot))

    def visible(self, g: int, length: int) -> list[int]:
        """Positions that the query at ``length`` sees of those before it."""
        grp = self.groups[g]
        sinks = grp.ring.sinks if grp.ring else 0
        return [p for p in range(length) if grp.window is None or length - p < grp.window or p < sinks]

    def state(self) -> object:
        tables = {
            i: (t.length, t.written, [list(t.entries(g)) for g in range(len(self.groups))])
            for i, (t, _) in self.requests.items()
        }
        return tables, [pool.free_ids() for pool in self.pools], [dict(m) for m in self.memory]

    @precondition(lambda self: len(self.requests) < 4)
    @rule()
    def open(self) -> None:
        self.requests[next(self.ids)] = (Table(self.groups, self.pools), [])

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), n=st.integers(0, CHUNK), kept=st.integers(0, CHUNK))
    def step(self, data: st.DataObject, n: int, kept: int) -> None:
        """Reserve n places, write them all, commit some of them (drafts), give back what no query sees."""
        request = data.draw(st.sampled_from(sorted(self.requests)))
        table, rows = self.requests[request]
        before, needs = self.state(), table.needed(n)
        fits = all(need <= pool.num_free for need, pool in zip(needs, self.pools, strict=True))
        used = [pool.num_used for pool in self.pools]
        try:
            table.extend(n)
        except OutOfBlocks:
            assert not fits
            assert self.state() == before
            return
        assert fits
        assert [pool.num_used - u for pool, u in zip(self.pools, used, strict=True)] == list(needs)
        kept, oldest = min(kept, n), len(rows)
        for i in range(n):
            row = (request, next(self.tokens))
            self.write(table, oldest + i, row)
            if i < kept:
                rows.append(row)
        for g in range(len(self.groups)):
            # Before anything is given back the oldest query of the step still sees its whole window.
            assert all(self.read(table, g, p) == rows[p] for p in self.visible(g, oldest))
        table.commit(kept)
        table.truncate(table.written)
        table.give_back()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), length=st.integers(0, 30))
    def truncate(self, data: st.DataObject, length: int) -> None:
        table, rows = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        before = self.state()
        intact = (
            length == 0
            or length >= len(rows)
            or all(table.start(g) <= grp.first_needed(length) for g, grp in enumerate(self.groups))
        )
        try:
            table.truncate(length)
        except NotResident:
            assert not intact
            assert self.state() == before
            return
        assert intact
        del rows[length:]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        table, _ = self.requests.pop(data.draw(st.sampled_from(sorted(self.requests))))
        table.release()
        table.release()

    @invariant()
    def every_visible_row_is_the_one_that_was_written(self) -> None:
        if not hasattr(self, "groups"):
            return
        check(self.groups, self.pools, [table for table, _ in self.requests.values()])
        for table, rows in self.requests.values():
            assert table.written == table.length == len(rows)
            for g, grp in enumerate(self.groups):
                assert all(self.read(table, g, p) == rows[p] for p in self.visible(g, len(rows)))
                assert all(self.read(table, g, p) == rows[p] for p in range(table.start(g), len(rows)))
                assert len(table.held(g)) <= grp.blocks_for(max(len(rows), 1), CHUNK)
        if not self.requests:
            assert all(pool.num_free == pool.num_blocks for pool in self.pools)


Tables.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTables = Tables.TestCase
