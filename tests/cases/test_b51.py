"""B51: block ids are 32-bit, what they are multiplied into is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvist.base.dtypes import BFLOAT16, FLOAT32
from kvist.cache.addressing import Paged, byte_offset
from kvist.cache.layout import Group, Layout
from kvist.cache.rows import KeyValue
from kvist.cache.sizing import pool_bytes
from kvist.kernels.blockformat import read_k, read_v, write_kv
from kvist.kernels.ops import LayerStore

BLOCKS = 64_000
STRIDE = 16 * 32 * 128  # 65,536: block 32,768 begins at 2^31
EDGES = [32_767, 32_768, 40_000, BLOCKS - 1]


@pytest.mark.parametrize("kind", [int, np.int32, np.int64, lambda b: torch.tensor(b, dtype=torch.int32)])
def test_offsets_are_exact_whatever_type_the_id_came_in(kind: type) -> None:
    assert [byte_offset(kind(b), STRIDE) for b in EDGES] == [2_147_418_112, 2_147_483_648, 2_621_440_000, 4_194_238_464]
    assert byte_offset(kind(BLOCKS), STRIDE) == 4_194_304_000
    assert [byte_offset(kind(b), 1_039_680, 5) for b in (2065, 2066)] == [2_146_939_205, 2_147_978_885]


def test_the_planted_fault_is_visible() -> None:
    with np.errstate(over="ignore"):
        wrapped = [int(np.int32(b) * np.int32(STRIDE)) for b in EDGES[:3]]
    assert wrapped == [2_147_418_112, -2_147_483_648, -1_673_527_296]


def test_rows_round_trip_beyond_two_gigabytes(tmp_path: Path) -> None:
    # A sparse file of one-byte elements stands for a pool of 4.2 GB; only what is written takes space.
    layout = Layout(KeyValue(8, 128, 128), BFLOAT16, Paged(16))
    assert layout.block_bytes == STRIDE
    path = tmp_path / "pool"
    data = torch.from_numpy(np.memmap(path, np.uint8, "w+", shape=(BLOCKS, STRIDE)))
    store = LayerStore(data, BFLOAT16, 16, 8, 128, 128, 0)
    row = torch.tensor(EDGES, dtype=torch.int32)
    tokens = 16 * len(EDGES)
    k, v = (torch.randn(tokens, 8, 128).bfloat16() for _ in range(2))
    write_kv(store, row, torch.arange(tokens), k, v)
    assert torch.equal(read_k(store, row, 0, tokens), k)
    assert torch.equal(read_v(store, row, 0, tokens), v)
    with path.open("rb") as file:
        for index, block in enumerate(EDGES):
            for slot, head, channel in ((0, 0, 0), (7, 5, 100), (15, 7, 127)):
                file.seek(byte_offset(block, STRIDE, layout.k_element(head, slot, channel)))
                stored = torch.frombuffer(bytearray(file.read(2)), dtype=torch.bfloat16)
                assert stored[0] == k[16 * index + slot, head, channel]
    assert path.stat().st_blocks * 512 < 2**25


@pytest.mark.parametrize("blocks", [2**15, 2**16, 2**31 - 1, 2**31, 2**40])
def test_byte_counts_are_exact(blocks: int) -> None:
    group = Group(0, tuple(range(80)), Layout(KeyValue(8, 128, 128), FLOAT32, Paged(16)))
    assert pool_bytes((group,), (blocks,)) == 80 * 131_072 * blocks
    assert group.blocks_for(blocks, 1) == -(-blocks // 16)
