"""The only owner of K/V memory: one allocation per group, made once, with its block pools beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvist.base.errors import LayoutMismatch, OutOfMemory, UsageError
from kvist.cache.addressing import check_block_size
from kvist.cache.blocks import BlockPool
from kvist.cache.layout import Group
from kvist.cache.rows import State
from kvist.cache.sizing import pool_bytes, require_fits

ALIGNMENT = 64  # bytes: one cache line, and one AVX-512 register
_NAN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Pool:
    """Bytes ``[layers of the group, N, block_bytes]`` for each group, 64-byte aligned, never grown or moved.

    ``blocks[g]`` is the block pool of group g. Fresh memory is not touched, so untouched blocks cost no physical page.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        num_blocks: Sequence[int],
        *,
        available: int | None = None,
        chunk: int = 1,
        sequences: int = 1,
        poison: bool = False,
    ) -> None:
        """Allocate ``num_blocks[g]`` blocks for each group.

        ``available`` bytes are the limit; above it OutOfMemory is raised before anything is allocated, with the largest
        context that ``sequences`` requests in chunks of ``chunk`` could have. ``poison`` fills fresh and freed blocks
        with NaN, so that reading what nobody wrote shows. UsageError for block sizes that kernels cannot read.
        """
        if len(groups) != len(num_blocks):
            raise UsageError(f"{len(groups)} groups need as many block counts, not {len(num_blocks)}")
        for group in groups:
            if not isinstance(group.layout.rows, State):
                check_block_size(group.block_size)
        self.groups = tuple(groups)
        self.nbytes = pool_bytes(groups, num_blocks)
        if available is not None:
            require_fits(groups, num_blocks, available, chunk, sequences)
        self._data = tuple(_allocate(group, blocks) for group, blocks in zip(groups, num_blocks, strict=True))
        self._places = {layer: (g.index, row) for g in groups for row, layer in enumerate(g.layers)}
        if len(self._places) != sum(len(group.layers) for group in groups):
            raise UsageError("a layer stands in more than one group: every layer owns its rows once")
        self.blocks = tuple(self._block_pool(index, blocks, poison) for index, blocks in enumerate(num_blocks))
        if poison:
            self.poison()

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that are held or pinned now."""
        return pool_bytes(self.groups, [blocks.num_used for blocks in self.blocks])

    def group_of(self, layer: int) -> Group:
        """The group whose block table ``layer`` shares. UsageError when the layer is not cached here."""
        return self.groups[self._place(layer)[0]]

    def data(self, layer: int) -> Tensor:
        """The bytes of one layer, uint8 ``[N, block_bytes]``: a view."""
        group, row = self._place(layer)
        return self._data[group][row]

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy block ``source`` onto ``target`` in every layer of the group."""
        data = self._data[group]
        for block in (source, target):
            if not 0 <= block < data.shape[1]:
                raise LayoutMismatch(f"block {block} does not exist: group {group} has blocks 0 to {data.shape[1] - 1}")
        data[:, target] = data[:, source]

    def poison(self, group: int | None = None, blocks: Sequence[int] | None = None) -> None:
        """Fill ``blocks`` of ``group`` with NaN; all blocks, or all groups, when not given."""
        for index in range(len(self.groups)) if group is None else (group,):
            layout = self.groups[index].layout
            if isinstance(layout.rows, State):
                self._fill(index, blocks, torch.uint8, 0xFF)
            else:
                self._fill(index, blocks, _NAN[layout.dtype.name], float("nan"))

    def _fill(self, group: int, blocks: Sequence[int] | None, dtype: torch.dtype, value: float) -> None:
        typed = self._data[group].view(dtype)
        if blocks is None:
            typed.fill_(value)
        else:
            typed[:, torch.tensor(blocks, dtype=torch.int64)] = value

    def _block_pool(self, index: int, num_blocks: int, poison: bool) -> BlockPool:
        return BlockPool(num_blocks, on_free=(lambda freed: self.poison(index, freed)) if poison else None)

    def _place(self, layer: int) -> tuple[int, int]:
        if layer not in self._places:
            raise UsageError(f"layer {layer} is not in this cache: it holds layers {sorted(self._places)}")
        return self._places[layer]


def _allocate(group: Group, num_blocks: int) -> Tensor:
    """Untouched bytes ``[layers, N, block_bytes]`` that begin at a multiple of 64."""
    if num_blocks < 0:
        raise UsageError(f"group {group.index} cannot have {num_blocks} blocks: use 0 or more")
    size = num_blocks * group.bytes_per_block
    try:
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    except RuntimeError as error:
        raise OutOfMemory(
            f"the system refused {size} bytes for the cache of layers {group.layers[0]} to {group.layers[-1]}: "
            "lower the context or the number of requests, or choose a narrower type"
        ) from error
    skipped = -memory.data_ptr() % ALIGNMENT
    return memory[skipped : skipped + size].view(len(group.layers), num_blocks, group.layout.block_bytes)
