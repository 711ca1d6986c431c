from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from kvist.base.errors import LayoutMismatch, OutOfMemory, UsageError
from kvist.cache.addressing import Paged
from kvist.cache.layout import Group, Layout
from kvist.cache.pool import ALIGNMENT, Pool
from kvist.cache.rows import KeyValue, Latent, Rows, State
from kvist.cache.sizing import blocks_for, context_bytes, largest_context, pool_bytes
from kvist.kernels.ops import torch_dtype


def group(
    index: int = 0,
    layers: tuple[int, ...] = (0,),
    window: int | None = None,
    rows: Rows = KeyValue(2, 8, 8),  # noqa: B008 - frozen
    dtype: DType = FLOAT32,
) -> Group:
    return Group(index, layers, Layout(rows, dtype, Paged(16)), window)


GROUPS = (group(0, (0, 2, 4)), group(1, (1, 3), window=20))


def test_bytes_are_those_of_the_formula() -> None:
    pool = Pool(GROUPS, (5, 3))
    assert pool.nbytes == pool_bytes(GROUPS, (5, 3)) == (3 * 5 + 2 * 3) * 16 * 2 * 16 * 4
    assert sum(pool.data(layer).numel() for layer in range(5)) == pool.nbytes
    assert pool.used_bytes == 0
    pool.blocks[1].reserve(2)
    assert pool.used_bytes == 2 * GROUPS[1].bytes_per_block


def test_every_layer_has_bytes_of_its_own_on_whole_cache_lines() -> None:
    pool = Pool(GROUPS, (2, 2))
    for layer in range(5):
        pool.data(layer).fill_(layer)
        assert pool.data(layer).data_ptr() % ALIGNMENT == 0
    assert [int(pool.data(layer).unique()) for layer in range(5)] == [0, 1, 2, 3, 4]
    assert (pool.group_of(2).index, pool.group_of(3).index) == (0, 1)
    with pytest.raises(UsageError, match=r"layer 5 is not in this cache: it holds layers \[0, 1, 2, 3, 4\]"):
        pool.data(5)


def test_the_allocation_is_made_once_and_never_moves() -> None:
    pool = Pool(GROUPS, (2, 2))
    before = [pool.data(layer).data_ptr() for layer in range(5)]
    for blocks in pool.blocks:
        ids = blocks.reserve(2)
        blocks.release(ids)
    pool.copy_block(0, 0, 1)
    assert [pool.data(layer).data_ptr() for layer in range(5)] == before


def test_copy_block_copies_all_layers_and_nothing_else() -> None:
    pool = Pool(GROUPS, (3, 3))
    for layer in range(5):
        pool.data(layer).copy_(torch.randint(0, 256, pool.data(layer).shape, dtype=torch.uint8))
    before = [pool.data(layer).clone() for layer in range(5)]
    pool.copy_block(0, 2, 0)
    for layer in range(5):
        expected = before[layer].clone()
        if layer in GROUPS[0].layers:
            expected[0] = expected[2]
        assert torch.equal(pool.data(layer), expected)
    with pytest.raises(LayoutMismatch, match="block 3 does not exist: group 0 has blocks 0 to 2"):
        pool.copy_block(0, 0, 3)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=lambda d: d.name)
def test_fresh_and_freed_blocks_are_nan_under_test(dtype: DType) -> None:
    pool = Pool((group(dtype=dtype, layers=(0, 1)),), (4,), poison=True)

    def poisoned() -> list[bool]:
        return [bool(pool.data(1)[block].view(torch_dtype(dtype)).isnan().all()) for block in range(4)]

    assert poisoned() == [True] * 4
    ids = pool.blocks[0].reserve(3)
    pool.data(1).zero_()
    pool.blocks[0].share([ids[0]])
    pool.blocks[0].release(ids)
    assert poisoned() == [False, True, True, False]


def test_a_latent_pool_and_a_state_pool() -> None:
    groups = (group(0, (0,), rows=Latent(12, 4)), Group(1, (1,), Layout(State(100), FLOAT32, Paged(1))))
    pool = Pool(groups, (2, 3), poison=True)
    assert tuple(pool.data(0).shape) == (2, 16 * 16 * 4)
    assert tuple(pool.data(1).shape) == (3, 100)


def test_a_pool_that_does_not_fit_is_refused_before_allocation() -> None:
    # 10^15 bytes could not be had: the refusal has to come first.
    counts = blocks_for(GROUPS, 10**12, chunk=32)
    available = 10**6
    with pytest.raises(OutOfMemory) as refusal:
        Pool(GROUPS, counts, available=available, chunk=32)
    fits = largest_context(GROUPS, available, chunk=32)
    message = str(refusal.value)
    assert str(pool_bytes(GROUPS, counts)) in message
    assert str(available) in message
    assert f"largest context that fits is {fits} tokens" in message
    Pool(GROUPS, blocks_for(GROUPS, fits, chunk=32), available=available, chunk=32)
    with pytest.raises(OutOfMemory):
        Pool(GROUPS, blocks_for(GROUPS, fits + 1, chunk=32), available=available, chunk=32)


def test_not_even_one_token() -> None:
    smallest = context_bytes(GROUPS, 1, 8)
    assert largest_context(GROUPS, smallest - 1, 8) == 0
    with pytest.raises(OutOfMemory, match=f"not even one token fits: the smallest pool takes {smallest} bytes"):
        Pool(GROUPS, blocks_for(GROUPS, 1, 8), available=smallest - 1, chunk=8)
    assert Pool(GROUPS, blocks_for(GROUPS, 1, 8), available=smallest, chunk=8).nbytes == smallest


def test_memory_that_the_system_refuses_is_an_error_of_ours() -> None:
    with pytest.raises(OutOfMemory, match="the system refused"):
        Pool(GROUPS, (2**50, 1))


def test_a_window_alone_has_no_largest_context() -> None:
    windows = (group(0, (0,), window=20),)
    enough = context_bytes(windows, 10**9, 8)
    assert largest_context(windows, enough, 8) >= 10**9
    with pytest.raises(OutOfMemory, match="a context of any length fits for each of 2 requests"):
        Pool(windows, blocks_for(windows, 10**9, 8, sequences=3), available=2 * enough, chunk=8, sequences=2)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="block size 4"):
        Pool((Group(0, (0,), Layout(KeyValue(1, 4, 4), FLOAT32, Paged(4))),), (1,))
    with pytest.raises(UsageError, match="more than one group"):
        Pool((group(0, (0, 1)), group(1, (1,))), (1, 1))
    with pytest.raises(UsageError, match="as many block counts"):
        Pool(GROUPS, (1,))
    with pytest.raises(UsageError, match="-1 blocks"):
        Pool((group(),), (-1,))


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_inverse_agrees_with_the_forward_formula(sequences: int) -> None:
    for available in range(0, 10**6, 7919):
        fits = largest_context(GROUPS, available, 32, sequences)
        assert context_bytes(GROUPS, fits, 32, sequences) <= available or fits == 0
        assert context_bytes(GROUPS, fits + 1, 32, sequences) > available


UNTOUCHED = """
from kvist.base.dtypes import FLOAT32
from kvist.cache.addressing import Paged
from kvist.cache.layout import Group, Layout
from kvist.cache.pool import Pool
from kvist.cache.rows import KeyValue

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))

before = resident()
pool = Pool((Group(0, tuple(range(8)), Layout(KeyValue(8, 128, 128), FLOAT32, Paged(16))),), (2048,))
print(pool.nbytes, resident() - before)
"""


def test_fresh_memory_costs_nothing_until_it_is_written() -> None:
    # In a process of its own: here every pool is filled with NaN.
    out = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, check=True).stdout
    nbytes, touched = map(int, out.split())
    assert nbytes == 2**31
    assert touched < 2**26
