"""Where the tokens of one request are: a block table for each group, and counts that are never inferred from data.

``length``   positions that have a place reserved
``written``  positions whose rows are in the pool; moves only through commit and truncate
``start``    of each group: the first position still stored (sinks of a ring aside)
``resident`` of each group: ``written - start``
"""

from __future__ import annotations

from collections.abc import Sequence

from kvist.base.errors import CacheError, NotResident, OutOfBlocks, TooLong, UsageError
from kvist.cache.addressing import Contiguous
from kvist.cache.blocks import BlockPool
from kvist.cache.layout import Group
from kvist.cache.rows import State

GONE = -1  # a table entry whose block was given back


class Table:
    """The blocks of one request. One step is: extend(n), the step itself, commit(n), give_back().

    Every method that can fail checks first: a refusal leaves tables, pools and counts as they were.
    """

    def __init__(self, groups: Sequence[Group], pools: Sequence[BlockPool]) -> None:
        """Make an empty table over ``pools[g]`` of each group. UsageError when a group has no token rows or no pool."""
        if len(groups) != len(pools):
            raise UsageError(f"{len(groups)} groups need as many block pools, not {len(pools)}")
        for group in groups:
            if isinstance(group.layout.rows, State):
                raise UsageError(f"group {group.index} is a recurrent state: it has no positions to keep a table of")
        self.groups = tuple(groups)
        self._pools = tuple(pools)
        self._entries: tuple[list[int], ...] = tuple([] for _ in groups)
        self._rings: list[list[int]] = [[] for _ in groups]  # the blocks that a ring group owns, in ring order
        self._starts = [0] * len(groups)
        self._length = 0
        self._written = 0

    @property
    def length(self) -> int:
        """Positions that have a place reserved."""
        return self._length

    @property
    def written(self) -> int:
        """Positions whose rows are in the pool: also the position of the next token."""
        return self._written

    def start(self, group: int) -> int:
        """The first position that ``group`` still stores, sinks of a ring aside."""
        return self._starts[group]

    def resident(self, group: int) -> int:
        """How many positions from ``start`` on are stored in ``group``."""
        return self._written - self._starts[group]

    def entries(self, group: int) -> Sequence[int]:
        """Block id of each table index, -1 where it was given back. A live view: copy it to keep it."""
        return self._entries[group]

    def held(self, group: int) -> list[int]:
        """The blocks that this table holds a reference of, each once."""
        return list(self._rings[group]) or [block for block in self._entries[group] if block != GONE]

    def needed(self, n: int) -> tuple[int, ...]:
        """Blocks that ``extend(n)`` would take of each group now."""
        return tuple(self._needed(group, self._check_extension(n)) for group in self.groups)

    def extend(self, n: int) -> None:
        """Reserve places for the next ``n`` positions, in every group or in none (OutOfBlocks)."""
        length = self._check_extension(n)
        needs = [self._needed(group, length) for group in self.groups]
        for group, pool, need in zip(self.groups, self._pools, needs, strict=True):
            if need > pool.num_free:
                raise OutOfBlocks(
                    f"{n} more tokens after {self._length} need {need} blocks of group {group.index} "
                    f"({group.block_size} positions each) and {pool.num_free} of {pool.num_blocks} are free; nothing "
                    "was reserved: wait for a request to finish, or give the cache more memory"
                )
        taken: list[list[int]] = []
        try:
            for pool, need in zip(self._pools, needs, strict=True):
                taken.append(pool.reserve(need))
        except BaseException:
            for pool, blocks in zip(self._pools, taken, strict=False):
                pool.release(blocks)
            raise
        for group, blocks in zip(self.groups, taken, strict=True):
            self._place(group, blocks, length)
        self._length = length

    def shareable(self, n: int) -> int:
        """How many of this request's first ``n`` positions another table can begin with: whole blocks that are stored.

        0 where a window or ring no longer has what the next query would see.
        """
        whole = max(group.block_size for group in self.groups)
        n = min(n, self._written) // whole * whole
        for group in self.groups:
            if group.ring or n % group.block_size or group.first_needed(n) < self._starts[group.index]:
                return 0
        return n

    def begin_with(self, other: Table, n: int) -> None:
        """Start this empty table with the first ``n`` positions of ``other``, whose blocks both then hold.

        CacheError unless ``other.shareable(n)`` is n and this table is empty. Only whole blocks are shared and nobody
        writes a whole block again, so neither request can reach the other's rows.
        """
        if self._length or other.shareable(n) != n:
            raise CacheError(f"a table of {self._length} positions cannot begin with {n} positions of another")
        for group, pool in zip(self.groups, self._pools, strict=True):
            index = group.index
            entries = other._entries[index][: n // group.block_size]
            first = group.first_needed(n) // group.block_size
            kept = [GONE if i < first else block for i, block in enumerate(entries)]
            pool.share(block for block in kept if block != GONE)
            self._entries[index].extend(kept)
            self._starts[index] = first * group.block_size
        self._length = self._written = n

    def commit(self, n: int) -> None:
        """The rows of the next ``n`` reserved positions are in the pool now."""
        if n < 0 or self._written + n > self._length:
            raise CacheError(
                f"{n} rows cannot be committed: {self._written} are written and places reach to {self._length}, "
                f"so 0 to {self._length - self._written} can be"
            )
        self._written += n

    def give_back(self) -> int:
        """Free the blocks that no query from position ``written`` on can see; how many entries became -1."""
        dropped = 0
        for group, pool in zip(self.groups, self._pools, strict=True):
            if group.window is None:
                continue
            entries, size = self._entries[group.index], group.block_size
            sinks = group.ring.sink_blocks if group.ring else 0
            last = min(group.first_needed(self._written) // size, len(entries))
            indices = [i for i in range(max(self._starts[group.index] // size, sinks), last) if entries[i] != GONE]
            if not group.ring:
                # The oldest is the least likely to be asked for again, so it is reused first.
                pool.release([entries[i] for i in indices])
            for i in indices:
                entries[i] = GONE
            if last > sinks:
                self._starts[group.index] = max(self._starts[group.index], last * size)
            dropped += len(indices)
        return dropped

    def truncate(self, length: int) -> None:
        """Forget the positions from ``length`` on. A length beyond the end changes nothing.

        NotResident, and nothing changes, when a window or ring has dropped keys that the next query would see.
        """
        if length < 0:
            raise UsageError(f"a table cannot be cut to {length} tokens: use 0 or more")
        if length >= self._length:
            return
        for group in self.groups:
            needed, start = group.first_needed(length), self._starts[group.index]
            if 0 < length < self._written and needed < start:
                raise NotResident(
                    f"the request cannot go back from {self._written} to {length} tokens: its next token would see "
                    f"keys from position {needed} on, but a window of {group.window} has given back everything before "
                    f"{start}; recompute the request from its start (truncate to 0)"
                )
        for group, pool in zip(self.groups, self._pools, strict=True):
            inside, entries = length // group.block_size, self._entries[group.index]
            if length % group.block_size and not group.ring and pool.refs(entries[inside]) > 1:
                raise CacheError(
                    f"the request cannot go back to {length} tokens: position {length} lies in a block that another "
                    f"request shares, and would be written again; cut at a multiple of {group.block_size}, or at 0"
                )
        for group, pool in zip(self.groups, self._pools, strict=True):
            self._cut(group, pool, length)
        self._length = length
        self._written = min(self._written, length)

    def release(self) -> None:
        """Give every block back. The table is empty afterwards; releasing it again changes nothing."""
        self.truncate(0)

    def _check_extension(self, n: int) -> int:
        if n < 0:
            raise UsageError(f"a table cannot be extended by {n} positions: use 0 or more")
        length = self._length + n
        for group in self.groups:
            if isinstance(group.layout.addressing, Contiguous) and length > group.block_size:
                raise TooLong(
                    f"{n} more tokens after {self._length} exceed a contiguous cache of {group.block_size} positions"
                )
            if group.ring and length - self._written > group.ring.chunk:
                raise TooLong(
                    f"{length - self._written} tokens at once exceed the {group.ring.chunk} that a ring of "
                    f"{group.ring.capacity} rows has room for beside its window: feed fewer at a time"
                )
        return length

    def _needed(self, group: Group, length: int) -> int:
        if group.ring:
            return group.ring.num_blocks if length and not self._rings[group.index] else 0
        return -(-length // group.block_size) - len(self._entries[group.index])

    def _place(self, group: Group, blocks: list[int], length: int) -> None:
        entries = self._entries[group.index]
        if group.ring is None:
            entries.extend(blocks)
            return
        if blocks:
            self._rings[group.index] = blocks
        own, ring = self._rings[group.index], group.ring
        for index in range(len(entries), -(-length // group.block_size)):
            entries.append(own[ring.block(index)])
            before = index - ring.cycle_blocks
            if before >= ring.sink_blocks and entries[before] != GONE:
                # The same block now holds newer positions: the older ones are gone, needed or not.
                entries[before] = GONE
                self._starts[group.index] = (before + 1) * group.block_size

    def _cut(self, group: Group, pool: BlockPool, length: int) -> None:
        entries, keep = self._entries[group.index], -(-length // group.block_size)
        if group.ring is None:
            # Tail first: a prompt's beginning is what others are most likely to ask for again.
            pool.release([block for block in reversed(entries[keep:]) if block != GONE])
        elif length == 0:
            pool.release(reversed(self._rings[group.index]))
            self._rings[group.index] = []
        del entries[keep:]
        if length == 0:
            self._starts[group.index] = 0
