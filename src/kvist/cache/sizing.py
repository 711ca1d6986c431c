"""How many blocks and bytes a cache needs. Pool, tables and planner all ask here, so bytes are counted once."""

from __future__ import annotations

from collections.abc import Sequence

from kvist.base.errors import OutOfMemory
from kvist.cache.layout import Group

# What loading takes when nobody says, and what a plan therefore counts with.
BLOCK_SIZE = 64
DEFAULT_CTX = 8192  # most tokens of a request, if the model allows as many
STEP_TOKENS = 512  # most tokens of one step, all requests together

_CTX_LIMIT = 1 << 40  # beyond any model; ends the search when memory does not depend on the length


def step_tokens(ctx: int, sequences: int) -> int:
    """Most tokens of one step for ``sequences`` running requests of up to ``ctx``: each of them gets its token."""
    return max(min(STEP_TOKENS, ctx), sequences)


def blocks_for(groups: Sequence[Group], ctx: int, chunk: int, sequences: int = 1) -> tuple[int, ...]:
    """Blocks of each group for ``sequences`` requests of ``ctx`` tokens each, fed at most ``chunk`` at a time."""
    return tuple(sequences * group.blocks_for(ctx, chunk) for group in groups)


def pool_bytes(groups: Sequence[Group], num_blocks: Sequence[int]) -> int:
    """Bytes of a pool that has ``num_blocks[g]`` blocks in group g."""
    return sum(group.bytes_per_block * blocks for group, blocks in zip(groups, num_blocks, strict=True))


def bytes_per_token(groups: Sequence[Group]) -> int:
    """Bytes that one token adds while no window is full."""
    return sum(group.bytes_per_token for group in groups)


def shared_blocks(
    groups: Sequence[Group], ctx: int, chunk: int, sequences: int, memory: int | None = None
) -> tuple[int, ...]:
    """Blocks of each group when ``sequences`` requests share room for one context, or for what ``memory`` bytes hold.

    A window group needs no more than all windows at once, and no more than the tokens that there are.
    """
    bounds = list(zip(groups, blocks_for(groups, ctx, chunk, sequences), strict=True))

    def blocks(tokens: int) -> tuple[int, ...]:
        return tuple(max(min(-(-tokens // g.block_size), top), g.blocks_for(1, chunk)) for g, top in bounds)

    low, high = ctx, ctx if memory is None else ctx * sequences
    while low < high:
        middle = (low + high + 1) // 2
        if pool_bytes(groups, blocks(middle)) <= (memory or 0):
            low = middle
        else:
            high = middle - 1
    return blocks(low)


def row_bytes(groups: Sequence[Group], ctx: int) -> int:
    """Bytes of the rows that one sequence of ``ctx`` tokens must keep: what no block size can go below."""
    return sum(group.row_bytes(ctx) for group in groups)


def context_bytes(groups: Sequence[Group], ctx: int, chunk: int, sequences: int = 1) -> int:
    """Bytes of the pool that ``sequences`` requests of ``ctx`` tokens need, whole blocks counted."""
    return pool_bytes(groups, blocks_for(groups, ctx, chunk, sequences))


def largest_context(groups: Sequence[Group], available: int, chunk: int, sequences: int = 1) -> int:
    """The longest context whose pool fits into ``available`` bytes; 0 when not even one token does."""
    low, high = 0, 1
    while high < _CTX_LIMIT and context_bytes(groups, high, chunk, sequences) <= available:
        low, high = high, high * 2
    if high >= _CTX_LIMIT:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if context_bytes(groups, middle, chunk, sequences) <= available:
            low = middle
        else:
            high = middle
    return low


def require_fits(groups: Sequence[Group], num_blocks: Sequence[int], available: int, chunk: int, sequences: int) -> int:
    """Bytes of the pool, or OutOfMemory with what it needs, what there is, and the largest context that fits."""
    needed = pool_bytes(groups, num_blocks)
    if needed <= available:
        return needed
    largest = largest_context(groups, available, chunk, sequences)
    each = f" for each of {sequences} requests" if sequences > 1 else ""
    if largest >= _CTX_LIMIT:
        remedy = f"a context of any length fits{each}"
    elif largest:
        remedy = f"the largest context that fits is {largest} tokens{each}"
    else:
        remedy = f"not even one token fits: the smallest pool takes {context_bytes(groups, 1, chunk, sequences)} bytes"
    raise OutOfMemory(
        f"the cache needs {needed} bytes ({_readable(needed)}) and {available} ({_readable(available)}) are available: "
        f"nothing was allocated. With at most {chunk} tokens of a request in one step, {remedy}"
    )


def _readable(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
