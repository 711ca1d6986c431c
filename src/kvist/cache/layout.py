"""A layout is one answer each to: which rows, which encoding, which addressing. Frozen, exact, without storage.

One layer's block holds, for each kv head g, a K part ``[P/16][D/e][16][e]`` and then a V part ``[P/e][Dv][e]``, with
e = 2 for bfloat16 (dot products take neighbours in pairs) and 1 otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.base.dtypes import DType
from kvist.base.errors import LayoutMismatch, UsageError
from kvist.cache.addressing import TILE, Addressing, Contiguous, Paged, Ring, blocks_spanned
from kvist.cache.encoding import check_plain, elements_per_pair
from kvist.cache.rows import Rows, State, rows_of
from kvist.spec.model import Attention, ModelSpec


@dataclass(frozen=True, slots=True)
class Layout:
    """How one layer stores its rows. Sizes are bytes; LayoutMismatch when the three answers do not go together."""

    rows: Rows
    dtype: DType
    addressing: Addressing

    def __post_init__(self) -> None:
        """Check that the encoding can hold these rows."""
        if not isinstance(self.rows, State):
            check_plain(self.dtype, self.rows.parts[1], self.block_size)

    @property
    def block_size(self) -> int:
        """Positions of one block (P)."""
        return self.addressing.block_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token adds in one layer; 0 for a recurrent state."""
        return self.rows.elements_per_token * self.dtype.bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one layer's block; a recurrent state is one block of its own size."""
        if isinstance(self.rows, State):
            return self.rows.bytes
        return self.block_size * self.bytes_per_token

    @property
    def head_bytes(self) -> int:
        """Bytes of one kv head in a block: its K part and its V part."""
        _, k_width, v_width = self.rows.parts
        return self.block_size * (k_width + v_width) * self.dtype.bytes

    def k_offset(self, head: int) -> int:
        """Byte within a block at which the K part of kv head ``head`` begins."""
        heads = self.rows.parts[0]
        if not 0 <= head < heads:
            raise UsageError(f"kv head {head} does not exist: there are {heads}")
        return head * self.head_bytes

    def v_offset(self, head: int) -> int:
        """Byte within a block at which the V part of kv head ``head`` begins. LayoutMismatch when there is none."""
        k_width, v_width = self.rows.parts[1:]
        if v_width == 0:
            raise LayoutMismatch(
                "a latent row has no value part: the value is the first kv_lora_rank elements of its key"
            )
        return self.k_offset(head) + self.block_size * k_width * self.dtype.bytes

    def k_element(self, head: int, slot: int, channel: int) -> int:
        """Byte within a block of one element of a key."""
        pair, k_width = elements_per_pair(self.dtype), self.rows.parts[1]
        tile, lane = divmod(self._slot(slot), TILE)
        element = (
            (tile * (k_width // pair) + _channel(channel, k_width) // pair) * TILE + lane
        ) * pair + channel % pair
        return self.k_offset(head) + element * self.dtype.bytes

    def v_element(self, head: int, slot: int, channel: int) -> int:
        """Byte within a block of one element of a value."""
        pair, v_width, part = elements_per_pair(self.dtype), self.rows.parts[2], self.v_offset(head)
        element = (self._slot(slot) // pair * v_width + _channel(channel, v_width)) * pair + slot % pair
        return part + element * self.dtype.bytes

    def _slot(self, slot: int) -> int:
        if not 0 <= slot < self.block_size:
            raise UsageError(f"slot {slot} is outside a block of {self.block_size} positions")
        return slot


@dataclass(frozen=True, slots=True)
class Group:
    """The layers that share one block table: the same rows, type and window.

    ``layers`` are layer indices. ``window`` is the number of visible keys, the current one included; None sees all.
    """

    index: int
    layers: tuple[int, ...]
    layout: Layout
    window: int | None = None

    def __post_init__(self) -> None:
        """Refuse a group without layers, or a window that sees nothing or contradicts a ring (UsageError)."""
        if not self.layers:
            raise UsageError(f"group {self.index} has no layers")
        if self.window is not None and self.window <= 0:
            raise UsageError(f"a window of {self.window} keys sees nothing: it must be 1 or more")
        ring = self.ring
        if ring is not None and self.window != ring.window:
            raise UsageError(
                f"a ring of {ring.capacity} rows with {ring.sinks} sinks shows the newest {ring.window} keys, "
                f"but the group's window is {self.window}"
            )

    @property
    def ring(self) -> Ring | None:
        """The ring of this group, if that is its addressing."""
        return self.layout.addressing if isinstance(self.layout.addressing, Ring) else None

    @property
    def block_size(self) -> int:
        """Positions of one block (P)."""
        return self.layout.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block id over all layers of the group."""
        return len(self.layers) * self.layout.block_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more stored token takes over all layers of the group."""
        return len(self.layers) * self.layout.bytes_per_token

    def first_needed(self, position: int) -> int:
        """The first position (sinks aside) that the query at ``position`` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def blocks_for(self, ctx: int, chunk: int) -> int:
        """The most blocks that one sequence of ``ctx`` tokens, fed at most ``chunk`` at a time, holds at any moment.

        A window W keeps, while a step writes p..p+chunk-1, the positions p-W+1..p+chunk-1, wherever blocks begin.
        """
        if ctx < 0 or chunk <= 0:
            raise UsageError(f"a sequence of {ctx} tokens in chunks of {chunk} cannot be: use 0 or more, and 1 or more")
        if ctx == 0:
            return 0
        if isinstance(self.layout.rows, State):
            return 1
        if self.ring is not None:
            return self.ring.num_blocks
        everything = -(-ctx // self.block_size)
        if isinstance(self.layout.addressing, Contiguous):
            return 1
        if self.window is None:
            return everything
        return min(everything, blocks_spanned(self.window - 1 + chunk, self.block_size))

    def row_bytes(self, ctx: int) -> int:
        """Bytes of the rows that a sequence of ``ctx`` tokens must keep: what no block size can go below."""
        if isinstance(self.layout.rows, State):
            return self.bytes_per_block if ctx > 0 else 0
        kept = ctx if self.window is None else min(ctx, self.window + (self.ring.sinks if self.ring else 0))
        return kept * self.bytes_per_token


def groups_of(spec: ModelSpec, dtype: DType, block_size: int, ring_chunk: int | None = None) -> tuple[Group, ...]:
    """The groups of a model's layers, in order of first appearance.

    ``ring_chunk``: layers with a window behind sinks are kept in rings, with room for steps of that many tokens.
    Without it their first blocks stay visible for ever, so nothing is given back and everything is counted.
    """
    members: dict[tuple[Rows, int | None, int], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        attention = layer.attention
        window, sinks = (attention.window, attention.sinks) if isinstance(attention, Attention) else (None, 0)
        if window is None or (sinks and ring_chunk is None):
            window, sinks = None, 0
        members.setdefault((rows_of(attention), window, sinks), []).append(index)
    groups = []
    for index, ((rows, window, sinks), layers) in enumerate(members.items()):
        addressing: Addressing = Paged(block_size)
        if sinks and window is not None and ring_chunk is not None:
            addressing = Ring(window + sinks, sinks, block_size, ring_chunk)
        groups.append(Group(index, tuple(layers), Layout(rows, dtype, addressing), window))
    return tuple(groups)


def _channel(channel: int, width: int) -> int:
    if not 0 <= channel < width:
        raise UsageError(f"channel {channel} is outside a row of width {width}")
    return channel
