"""Where a position is put. Pure integer maps, exact at any size; no storage and no torch.

There is one way to find a row: position p stands in block ``block_table[p // block_size]`` at slot ``p % block_size``.
The three addressings differ only in which blocks a table's entries name.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.base.errors import UsageError

TILE = 16  # positions of one K tile
SPLIT = 128  # keys of one attention split
_BLOCK_SIZES = "16, 32, 64, 128 or a multiple of 128"


def check_block_size(block_size: int) -> None:
    """Refuse (UsageError) a block size that kernels cannot read: no multiple of 16, or crossing splits of 128."""
    if block_size <= 0 or block_size % TILE:
        raise UsageError(
            f"block size {block_size} is not a multiple of {TILE}: use 16, 32, 64, 128 or a multiple of 128"
        )
    if SPLIT % block_size and block_size % SPLIT:
        raise UsageError(f"block size {block_size} neither divides nor is a multiple of {SPLIT}: use {_BLOCK_SIZES}")


def blocks_spanned(positions: int, block_size: int) -> int:
    """The most blocks that ``positions`` consecutive positions can touch, wherever they begin."""
    return 0 if positions <= 0 else (positions + block_size - 2) // block_size + 1


@dataclass(frozen=True, slots=True)
class Paged:
    """Any free block for any entry. Under a window, entries that no query can see any more become -1."""

    block_size: int

    def __post_init__(self) -> None:
        """Refuse an empty block (UsageError)."""
        _positive(self.block_size, "block_size")


@dataclass(frozen=True, slots=True)
class Contiguous:
    """One block that holds every position: ``block_size`` is the capacity."""

    block_size: int

    def __post_init__(self) -> None:
        """Refuse an empty block (UsageError)."""
        _positive(self.block_size, "block_size")


@dataclass(frozen=True, slots=True)
class Ring:
    """Bounded memory: the first ``sinks`` positions and the newest ``capacity - sinks``, at their own positions.

    Physically: whole sink blocks, kept for ever, then blocks that the table names again and again in a cycle. A step
    of up to ``chunk`` tokens may not overwrite what its own earlier queries still see, so the cycle has room for both.
    ``block`` and all that follows count a request's own blocks from 0.
    """

    capacity: int
    sinks: int
    block_size: int
    chunk: int = 1

    def __post_init__(self) -> None:
        """Refuse a ring that keeps nothing, or more sinks than rows (UsageError)."""
        _positive(self.block_size, "block_size")
        _positive(self.chunk, "chunk")
        if not 0 <= self.sinks < self.capacity:
            raise UsageError(
                f"a ring of {self.capacity} rows cannot keep {self.sinks} sinks: keep 0 or more, and fewer than rows"
            )

    @property
    def window(self) -> int:
        """How many of the newest keys a query sees, its own included."""
        return self.capacity - self.sinks

    @property
    def sink_blocks(self) -> int:
        """Blocks that hold a sink."""
        return -(-self.sinks // self.block_size)

    @property
    def cycle_blocks(self) -> int:
        """Blocks used again and again: enough for a window and one chunk wherever they begin."""
        return blocks_spanned(self.window - 1 + self.chunk, self.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of one request, whatever its length."""
        return self.sink_blocks + self.cycle_blocks

    def block(self, index: int) -> int:
        """Which of the request's own blocks the table names at ``index``."""
        if index < 0:
            raise UsageError(f"table index {index} is negative")
        if index < self.sink_blocks:
            return index
        return self.sink_blocks + (index - self.sink_blocks) % self.cycle_blocks


Addressing = Paged | Contiguous | Ring


def locate(position: int, block_size: int) -> tuple[int, int]:
    """(table index, slot in the block) of a position. UsageError when negative."""
    if position < 0:
        raise UsageError(f"position {position} is negative: positions count from 0")
    return divmod(position, block_size)


def byte_offset(block: int, block_bytes: int, within: int = 0) -> int:
    """Byte of a pool at which ``within`` of ``block`` lies; exact whatever integer type the block id came in."""
    return int(block) * int(block_bytes) + int(within)


def _positive(value: int, name: str) -> None:
    if value <= 0:
        raise UsageError(f"{name} is {value}: it must be 1 or more")
