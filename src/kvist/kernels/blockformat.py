"""The tiled form of K and V inside a block, as torch views: read and write rows by position.

Elements of one block, for each kv head g: K ``[P/16][D/e][16][e]``, then V ``[P/e][Dv][e]``, with e = 2 for bfloat16
(dot products take neighbours in pairs) and 1 otherwise. A ``value_in_key`` store has no V part: its values are the
first channels of its keys. Everything here is indexing of the pool's own bytes; nothing is computed, so a row read back
has the bits that were written.

A ``table_row`` is int [M]: position p stands in block ``table_row[p // P]``, and -1 marks a block that is not stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.base.errors import KernelError, NotResident
from kvist.cache.encoding import elements_per_pair
from kvist.kernels.ops import TILE, TORCH_DTYPES, LayerStore, torch_dtype


def block_elements(num_kv_heads: int, head_dim: int, v_head_dim: int, block_size: int) -> int:
    """Elements of one layer's block: K and V rows of ``block_size`` positions for every kv head."""
    return num_kv_heads * block_size * (head_dim + v_head_dim)


def why_not(store: LayerStore) -> str | None:
    """Why ``store`` is not in the block format; None when it is."""
    if store.dtype.name not in TORCH_DTYPES:
        return f"K/V of type {store.dtype.name} has no block format: use one of {', '.join(TORCH_DTYPES)}"
    if store.block_size <= 0 or store.block_size % TILE:
        return f"block size {store.block_size} is not a multiple of {TILE}, the positions of one K tile"
    pair = elements_per_pair(store.dtype)
    if store.head_dim % pair:
        return f"head_dim {store.head_dim} is odd, but {store.dtype.name} keys lie in pairs: use float16 or float32"
    if min(store.num_kv_heads, store.head_dim, store.v_head_dim) <= 0:
        return f"{store.num_kv_heads} kv heads of widths {store.head_dim} and {store.v_head_dim} hold nothing"
    if store.value_in_key and (store.num_kv_heads != 1 or store.v_head_dim > store.head_dim):
        return (
            f"values of width {store.v_head_dim} in {store.num_kv_heads} keys of width {store.head_dim}: "
            "a latent row is one key for all heads, its value the first channels of it"
        )
    if store.data.dtype != torch.uint8 or store.data.dim() != 2 or store.data.stride(1) != 1:
        return f"pool bytes must be uint8 [N, block_bytes], not {store.data.dtype} {list(store.data.shape)}"
    elements = block_elements(store.num_kv_heads, store.head_dim, store.v_stored, store.block_size)
    if store.data.shape[1] < elements * store.dtype.bytes:
        return f"a block of {store.data.shape[1]} bytes is shorter than its {elements * store.dtype.bytes} bytes of K/V"
    return None


def k_tiles(store: LayerStore) -> Tensor:
    """All keys as a view ``[N, G, P/16, D/e, 16, e]`` of the pool's bytes."""
    pair = elements_per_pair(store.dtype)
    part = _heads(store)[:, :, : store.block_size * store.head_dim]
    return part.view(*part.shape[:2], store.block_size // TILE, store.head_dim // pair, TILE, pair)


def v_tiles(store: LayerStore) -> Tensor:
    """All values as a view ``[N, G, P/16, 16/e, Dv, e]`` of the pool's bytes, cut into the same tiles as K.

    KernelError for a store whose values lie in its keys: ``k_tiles`` has them.
    """
    if store.value_in_key:
        raise KernelError(
            f"a latent row has no value of its own: it is the first {store.v_head_dim} channels of its key"
        )
    pair = elements_per_pair(store.dtype)
    part = _heads(store)[:, :, store.block_size * store.head_dim :]
    return part.view(*part.shape[:2], store.block_size // TILE, TILE // pair, store.v_head_dim, pair)


def blocks_at(table_row: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Block ids int64 of int64 ``positions``; -1 where nothing is stored or the position lies outside the table."""
    if table_row.numel() == 0:
        return torch.full_like(positions, -1)
    indices = positions.div(block_size, rounding_mode="floor")
    inside = (indices >= 0) & (indices < table_row.numel())
    return torch.where(inside, table_row.long()[indices.clamp(0, table_row.numel() - 1)], -1)


def read_k(store: LayerStore, table_row: Tensor, start: int, stop: int) -> Tensor:
    """Keys of positions start..stop as ``[stop - start, G, D]`` in the store's type; NaN where nothing is stored."""
    tiles, missing = _tiles_of(store, table_row, start, stop)
    # [n, G, D/e, 16, e] -> [n, 16, G, D/e, e]
    rows = k_tiles(store)[tiles[0], :, tiles[1]].permute(0, 3, 1, 2, 4)
    return _cut(rows.flatten(3), missing, start, stop)


def read_v(store: LayerStore, table_row: Tensor, start: int, stop: int) -> Tensor:
    """Values of positions start..stop as ``[stop - start, G, Dv]`` in the store's type; NaN where nothing is stored."""
    if store.value_in_key:
        return read_k(store, table_row, start, stop)[..., : store.v_head_dim]
    tiles, missing = _tiles_of(store, table_row, start, stop)
    # [n, G, 16/e, Dv, e] -> [n, 16/e, e, G, Dv]
    rows = v_tiles(store)[tiles[0], :, tiles[1]].permute(0, 2, 4, 1, 3)
    return _cut(rows.flatten(1, 2), missing, start, stop)


def write_kv(store: LayerStore, table_row: Tensor, positions: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Store rows k ``[T, G, D]`` and v ``[T, G, Dv]`` of one request at ``positions`` [T], each rounded once.

    ``v`` is None for a store whose values lie in its keys (KernelError when the two do not go together). Raises
    NotResident when a position has no block: writing it would land in somebody else's.
    """
    if (v is None) != store.value_in_key:
        raise KernelError("rows are a key and a value, or for a store with values in its keys a key alone")
    pair, size = elements_per_pair(store.dtype), store.block_size
    positions = positions.long()
    blocks = blocks_at(table_row, positions, size)
    if bool((blocks < 0).any()):
        position = int(positions[blocks < 0][0])
        raise NotResident(
            f"position {position} has no block in a table of {table_row.numel()} blocks of {size}: reserve it first"
        )
    slots = positions % size
    tile, lane = slots // TILE, slots % TILE
    dtype = torch_dtype(store.dtype)
    k_tiles(store)[blocks, :, tile, :, lane, :] = k.to(dtype).reshape(*k.shape[:2], k.shape[2] // pair, pair)
    if v is not None:
        v_tiles(store)[blocks, :, tile, lane // pair, :, lane % pair] = v.to(dtype)


def _heads(store: LayerStore) -> Tensor:
    """The pool's bytes as elements ``[N, G, P * (D + Dv)]``."""
    elements = block_elements(store.num_kv_heads, store.head_dim, store.v_stored, store.block_size)
    typed = store.data[:, : elements * store.dtype.bytes].view(torch_dtype(store.dtype))
    return typed.view(len(typed), store.num_kv_heads, elements // store.num_kv_heads)


def _tiles_of(store: LayerStore, table_row: Tensor, start: int, stop: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(block ids, tile in block) of every K tile that start..stop touches, and which of them are not stored."""
    if not 0 <= start <= stop:
        raise KernelError(f"positions {start}..{stop} are no range: start must lie between 0 and stop")
    first = torch.arange(start // TILE, -(-stop // TILE)) * TILE
    blocks = blocks_at(table_row, first, store.block_size)
    return (blocks.clamp(min=0), first % store.block_size // TILE), blocks < 0


def _cut(rows: Tensor, missing: Tensor, start: int, stop: int) -> Tensor:
    """Whole tiles ``[n, 16, G, width]`` cut to the rows start..stop, with NaN in tiles that are not stored."""
    if bool(missing.any()):
        rows = rows.masked_fill(missing.view(-1, 1, 1, 1), float("nan"))
    skipped = start % TILE
    return rows.flatten(0, 1)[skipped : skipped + stop - start]
