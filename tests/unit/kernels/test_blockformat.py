"""Rows come back with the bits they were written with, wherever the table puts them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8
from kvist.base.errors import KernelError, NotResident
from kvist.kernels.blockformat import block_elements, k_tiles, read_k, read_v, v_tiles, why_not, write_kv
from kvist.kernels.ops import torch_dtype
from kvist.verify.compare import bits_equal
from kvist.verify.kernels import Shape, new_store

DTYPES = [FLOAT32, BFLOAT16, FLOAT16]


def rows(length: int, heads: int, width: int, dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(length, heads, width, generator=torch.Generator().manual_seed(seed)).to(torch_dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_every_element_stands_where_the_documentation_says(dtype):
    G, D, Dv, P = 3, 6, 4, 32
    store = new_store(Shape(num_kv_heads=G, head_dim=D, v_head_dim=Dv, dtype=dtype, block_size=P), 2)
    k, v = rows(P, G, D, dtype), rows(P, G, Dv, dtype, seed=1)
    write_kv(store, torch.tensor([1]), torch.arange(P), k, v)
    flat = store.data[1].view(torch_dtype(dtype))
    e = 2 if dtype == BFLOAT16 else 1
    head = P * (D + Dv)
    for g in range(G):
        for p in (0, 1, 15, 16, 31):
            for d in range(D):
                tile, lane = divmod(p, 16)
                at = g * head + ((tile * (D // e) + d // e) * 16 + lane) * e + d % e
                assert flat[at] == k[p, g, d]
            for d in range(Dv):
                at = g * head + P * D + ((p // e) * Dv + d) * e + p % e
                assert flat[at] == v[p, g, d]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_rows_written_in_any_pieces_are_read_back_bit_for_bit(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    G = data.draw(st.integers(1, 3))
    D = data.draw(st.integers(1, 5)) * 2
    Dv = data.draw(st.integers(1, 7))
    P = data.draw(st.sampled_from([16, 32, 48, 128]))
    length = data.draw(st.integers(1, 3 * P))
    store = new_store(Shape(num_kv_heads=G, head_dim=D, v_head_dim=Dv, dtype=dtype, block_size=P), 5)
    table = torch.tensor(data.draw(st.permutations(range(5)))[:3], dtype=torch.int32)
    k, v = rows(length, G, D, dtype), rows(length, G, Dv, dtype, seed=1)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=4))})
    for start, stop in pairwise(cuts):
        write_kv(store, table, torch.arange(start, stop, dtype=torch.int32), k[start:stop], v[start:stop])
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    assert bits_equal(read_k(store, table, start, stop), k[start:stop])
    assert bits_equal(read_v(store, table, start, stop), v[start:stop])
    # Nothing else was touched: what was not written is still poison.
    written = length * G * (D + Dv)
    elements = store.data.view(torch_dtype(dtype))
    assert int(elements.isnan().sum()) == elements.numel() - written


def test_views_are_the_pool_itself():
    store = new_store(Shape(dtype=BFLOAT16), 3)
    for view in (k_tiles(store), v_tiles(store)):
        assert view.untyped_storage().data_ptr() == store.data.untyped_storage().data_ptr()


def test_blocks_longer_than_their_rows_and_layers_inside_one_allocation():
    shape = Shape(num_kv_heads=2, head_dim=4, v_head_dim=6, dtype=FLOAT32)
    elements = block_elements(2, 4, 6, 16)
    pool = torch.zeros(3, 4, elements * 4 + 64, dtype=torch.uint8)
    store = replace(new_store(shape, 1), data=pool[1])
    k, v = rows(16, 2, 4, FLOAT32), rows(16, 2, 6, FLOAT32)
    write_kv(store, torch.tensor([2]), torch.arange(16), k, v)
    assert bits_equal(read_k(store, torch.tensor([2]), 3, 16), k[3:])
    assert bits_equal(read_v(store, torch.tensor([2]), 0, 9), v[:9])
    assert not pool[0].any() and not pool[2].any() and not pool[1, :, elements * 4 :].any()


def test_what_is_not_stored_reads_as_nan_and_cannot_be_written():
    store = new_store(Shape(), 2)
    store.data.zero_()
    table = torch.tensor([-1, 1], dtype=torch.int32)
    k, v = rows(16, 2, 16, FLOAT32), rows(16, 2, 16, FLOAT32)
    write_kv(store, table, torch.arange(16, 32), k, v)
    got = read_k(store, table, 10, 20)
    assert got[:6].isnan().all() and bits_equal(got[6:], k[:4])
    assert read_v(store, table, 30, 40)[2:].isnan().all()
    for position in (3, 32, -1):
        with pytest.raises(NotResident, match=f"position {position} "):
            write_kv(store, table, torch.tensor([position]), k[:1], v[:1])
    with pytest.raises(KernelError, match=r"5\.\.3"):
        read_k(store, table, 5, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 4}, "block size 4 is not a multiple of 16"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"dtype": INT8}, "int8"),
        ({"v_head_dim": 0}, "widths 16 and 0"),
        ({"v_head_dim": 99}, "shorter"),
        ({"data": torch.zeros(2, 8)}, "uint8"),
    ],
)
def test_a_store_outside_the_format_is_refused_with_the_number(change, words):
    store = new_store(Shape(dtype=BFLOAT16), 2)
    assert why_not(store) is None
    assert words in str(why_not(replace(store, **change)))
