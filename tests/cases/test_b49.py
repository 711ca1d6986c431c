"""B49: growing the cache copies nothing; its memory is there once, from the start."""

from __future__ import annotations

import resource

import torch

from kvist.base.dtypes import FLOAT32
from kvist.cache.addressing import Paged
from kvist.cache.layout import Group, Layout
from kvist.cache.pool import Pool
from kvist.cache.rows import KeyValue
from kvist.cache.table import Table
from kvist.kernels.blockformat import write_kv
from kvist.kernels.ops import LayerStore

LAYERS, HEADS, WIDTH, CTX = 8, 4, 64, 4096
GROUP = Group(0, tuple(range(LAYERS)), Layout(KeyValue(HEADS, WIDTH, WIDTH), FLOAT32, Paged(16)))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_peak_is_the_cache_itself() -> None:
    pool = Pool((GROUP,), (GROUP.blocks_for(CTX, 512),), poison=True)
    assert pool.nbytes == 67_108_864
    before = peak()  # poison has touched every page
    places = [pool.data(layer).data_ptr() for layer in range(LAYERS)]
    stores = [LayerStore(pool.data(layer), FLOAT32, 16, HEADS, WIDTH, WIDTH, 0) for layer in range(LAYERS)]
    table = Table((GROUP,), pool.blocks)
    for n in [512] * 7 + [448] + [1] * 64:
        table.extend(n)
        row = torch.tensor(table.entries(0), dtype=torch.int32)
        positions = torch.arange(table.written, table.written + n)
        rows = torch.full((n, HEADS, WIDTH), float(table.written))
        for store in stores:
            write_kv(store, row, positions, rows, rows)
        table.commit(n)
    assert table.written == CTX
    # A step's own rows and indices may come and go; a layer of the cache is 8 MiB, the whole of it 64 MiB.
    assert peak() - before < pool.nbytes // LAYERS
    assert [pool.data(layer).data_ptr() for layer in range(LAYERS)] == places
    assert pool.used_bytes == pool.nbytes


def test_64_sequences_of_100_take_their_blocks_and_no_more() -> None:
    pool = Pool((GROUP,), (64 * GROUP.blocks_for(100, 100),))
    tables = [Table((GROUP,), pool.blocks) for _ in range(64)]
    for table in tables:
        table.extend(100)
    assert pool.used_bytes == pool.nbytes == 64 * 7 * 16 * LAYERS * HEADS * 2 * WIDTH * 4
    for table in tables[::2]:
        table.release()
    # Holes of any shape are usable: blocks need no neighbours.
    big = Table((GROUP,), pool.blocks)
    big.extend(32 * 7 * 16)
    assert pool.blocks[0].num_free == 0
