"""Who holds which block of one group: the free list, reference counts and pins. No storage and no torch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvist.base.errors import CacheError, OutOfBlocks, UsageError


class BlockPool:
    """Blocks 0..num_blocks-1. A block is free when nobody refers to it and nobody pins it.

    The free list is first in, first out, so which ids come next depends only on the calls made, never on the process.
    ``on_free`` hears the ids that have just become free (the pool overwrites them with NaN under test).
    """

    def __init__(self, num_blocks: int, on_free: Callable[[Sequence[int]], None] | None = None) -> None:
        """All blocks free, in ascending order. UsageError for a negative number."""
        if num_blocks < 0:
            raise UsageError(f"a pool of {num_blocks} blocks cannot be: use 0 or more")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._on_free = on_free

    @property
    def num_free(self) -> int:
        """Blocks that can be reserved now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that are held or pinned."""
        return self.num_blocks - len(self._free)

    def refs(self, block: int) -> int:
        """How many tables hold ``block``."""
        return self._refs[self._known(block)]

    def pins(self, block: int) -> int:
        """How many transfers pin ``block``."""
        return self._pins[self._known(block)]

    def free_ids(self) -> tuple[int, ...]:
        """The free blocks, next to be reserved first."""
        return tuple(self._free)

    def reserve(self, n: int) -> list[int]:
        """Take ``n`` blocks, each with one reference: all of them, or none and OutOfBlocks."""
        if n < 0:
            raise UsageError(f"{n} blocks cannot be reserved: use 0 or more")
        if n > len(self._free):
            raise OutOfBlocks(
                f"{n} blocks are needed and {len(self._free)} of {self.num_blocks} are free; none was reserved: "
                "wait for a request to finish, or give the cache more memory"
            )
        taken = [self._free.popitem(last=False)[0] for _ in range(n)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of ``blocks``, which somebody must already hold. All or none."""
        ids = list(blocks)
        for block in ids:
            if self._refs[self._known(block)] == 0:
                raise CacheError(f"block {block} cannot be shared: nobody holds it")
        for block in ids:
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> int:
        """Drop one reference of each of ``blocks``; how many became free. CacheError when one has none."""
        ids = list(blocks)
        for block, times in Counter(ids).items():
            if self._refs[self._known(block)] < times:
                raise CacheError(
                    f"block {block} is released {times} times but has {self._refs[block]} references: "
                    "it was released before; nothing was changed"
                )
        for block in ids:
            self._refs[block] -= 1
        return self._free_unheld(ids)

    def pin(self, blocks: Iterable[int]) -> None:
        """Keep held ``blocks`` from becoming free while something reads or writes them. All or none."""
        ids = list(blocks)
        for block in ids:
            if self._refs[self._known(block)] == 0 and self._pins[block] == 0:
                raise CacheError(f"block {block} cannot be pinned: it is free, and its content belongs to nobody")
        for block in ids:
            self._pins[block] += 1

    def unpin(self, blocks: Iterable[int]) -> int:
        """Undo one pin of each of ``blocks``; how many became free. CacheError when one has none."""
        ids = list(blocks)
        for block, times in Counter(ids).items():
            if self._pins[self._known(block)] < times:
                raise CacheError(
                    f"block {block} is unpinned {times} times but has {self._pins[block]} pins; nothing was changed"
                )
        for block in ids:
            self._pins[block] -= 1
        return self._free_unheld(ids)

    def _free_unheld(self, ids: list[int]) -> int:
        freed = [block for block in dict.fromkeys(ids) if self._refs[block] == 0 and self._pins[block] == 0]
        self._free.update(dict.fromkeys(freed))
        if freed and self._on_free is not None:
            self._on_free(freed)
        return len(freed)

    def _known(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise CacheError(f"block {block} does not exist: the pool has blocks 0 to {self.num_blocks - 1}")
        return block
