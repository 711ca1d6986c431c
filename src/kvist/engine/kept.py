"""What finished requests left in the pool, least recently used first, and whom a new request can begin like.

A match compares tokens, not digests, so there is nothing to collide. Kept rows live on free blocks only: whoever needs
blocks takes them back first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvist.base.errors import OutOfBlocks
from kvist.cache.table import Table

MOST = 64  # kept requests: a match looks at each


class Kept:
    """Tables of finished requests with the tokens whose rows they hold."""

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self._entries: list[tuple[NDArray[np.int32], Table]] = []

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables, least recently used first."""
        return tuple(table for _, table in self._entries)

    def add(self, ids: Sequence[int], table: Table) -> None:
        """Keep ``table``, which holds the rows of ``ids``; nothing that holds no whole block."""
        if table.shareable(len(ids)) == 0:
            table.release()
            return
        self._entries.append((np.asarray(ids, np.int32), table))
        if len(self._entries) > MOST:
            self._drop()

    def best(self, ids: Sequence[int], running: Iterable[tuple[Sequence[int], Table]]) -> tuple[Table | None, int]:
        """The table that has the most of the first rows of ``ids``, and how many: whole blocks of equal tokens."""
        wanted = np.asarray(ids, np.int32)
        best: tuple[Table | None, int] = (None, 0)
        used = -1
        for index, (have, table) in enumerate(self._entries):
            n = table.shareable(_common(wanted, have))
            if n > best[1]:
                best, used = (table, n), index
        for tokens, table in running:
            n = table.shareable(_common(wanted, np.asarray(tokens, np.int32)))
            if n > best[1]:
                best, used = (table, n), -1
        if used >= 0:
            self._entries.append(self._entries.pop(used))
        return best

    def extend(self, table: Table, n: int) -> None:
        """``table.extend(n)``, giving up kept requests as long as blocks are missing."""
        while True:
            try:
                table.extend(n)
                return
            except OutOfBlocks:
                if not self._entries:
                    raise
                self._drop()

    def clear(self) -> None:
        """Give everything up."""
        while self._entries:
            self._drop()

    def _drop(self) -> None:
        self._entries.pop(0)[1].release()


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many first elements are equal."""
    n = min(len(a), len(b))
    differs = np.nonzero(a[:n] != b[:n])[0]
    return int(differs[0]) if len(differs) else n
