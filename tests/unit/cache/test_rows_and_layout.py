from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, DType
from kvist.base.errors import LayoutMismatch, UsageError
from kvist.cache.addressing import Contiguous, Paged, Ring, blocks_spanned, check_block_size, locate
from kvist.cache.encoding import elements_per_pair
from kvist.cache.layout import Group, Layout, groups_of
from kvist.cache.pool import Pool
from kvist.cache.rows import KeyValue, Latent, State, rows_of
from kvist.cache.sizing import bytes_per_token
from kvist.kernels.blockformat import elements_per_pair as kernel_elements_per_pair
from kvist.kernels.blockformat import write_kv
from kvist.kernels.ops import LayerStore, torch_dtype
from kvist.spec.model import Attention, FeedForward, LatentAttention, LayerSpec, ModelSpec, Norm

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "chapter.json").read_text())


def spec(*attentions: Attention | LatentAttention) -> ModelSpec:
    norm = Norm("rms", 1e-6)
    layers = tuple(LayerSpec(a, FeedForward(8, "silu"), norm) for a in attentions)
    return ModelSpec("Tiny", "llama", 16, 32, layers, norm, 4096, True, "float32")


def heads(num_kv_heads: int = 2, head_dim: int = 8, window: int | None = None) -> Attention:
    return Attention(4, num_kv_heads, head_dim, head_dim, head_dim**-0.5, window)


def test_rows_of_each_attention() -> None:
    assert rows_of(heads(2, 8)) == KeyValue(2, 8, 8)
    assert rows_of(LatentAttention(128, 1536, 512, 128, 64, 128, 0.07)) == Latent(512, 64)


def test_the_chapters_memory_table() -> None:
    for name, layers, num_heads, width, tokens, expected, printed in GOLDEN["memory"]["rows"]:
        latent = num_heads is None
        rows = Latent(512, 64) if latent else KeyValue(num_heads, width, width)
        layout = Layout(rows, FLOAT16 if latent else FLOAT32, Paged(16))
        assert layers * layout.bytes_per_token == expected, name
        total, unit = layers * layout.bytes_per_token * tokens, 2**20 if printed.endswith("MB") else 2**30
        number = printed.split()[0]
        places = len(number.split(".")[1]) if "." in number else 0
        assert f"{total / unit:.{places}f}" == number, name


def test_latent_rows_against_full_heads() -> None:
    golden = GOLDEN["latent"]
    toy, full = Latent(16, 8), KeyValue(8, 8, 8)
    assert (full.elements_per_token, toy.elements_per_token) == (128, 24)
    assert f"{full.elements_per_token / toy.elements_per_token:.1f}x" == golden["ratio"] == "5.3x"
    deepseek, as_heads = Latent(512, 64), KeyValue(128, 128, 128)
    assert (as_heads.elements_per_token, deepseek.elements_per_token) == (32768, 576)
    assert f"{as_heads.elements_per_token / deepseek.elements_per_token:.1f}x" == "56.9x"
    assert golden["deepseek_v3"] == {"mha": 32768, "latent": 576, "ratio": "56.9x"}


def test_latent_has_no_second_copy_of_the_value() -> None:
    layout = Layout(Latent(8, 4), FLOAT32, Paged(16))
    assert layout.block_bytes == 16 * 12 * 4
    with pytest.raises(LayoutMismatch, match="first kv_lora_rank elements"):
        layout.v_element(0, 0, 0)


def test_state_is_one_place_per_request() -> None:
    layout = Layout(State(1000), FLOAT32, Paged(16))
    group = Group(0, (0, 1), layout)
    assert (layout.bytes_per_token, layout.block_bytes) == (0, 1000)
    assert [group.blocks_for(ctx, 8) for ctx in (0, 1, 100_000)] == [0, 1, 1]
    assert [group.row_bytes(ctx) for ctx in (0, 1, 100_000)] == [0, 2000, 2000]
    with pytest.raises(LayoutMismatch, match="1000 bytes"):
        layout.k_element(0, 0, 0)


def test_layouts_are_frozen() -> None:
    layout = Layout(KeyValue(2, 8, 8), FLOAT32, Paged(16))
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.dtype = FLOAT16  # type: ignore[misc]
    assert layout == Layout(KeyValue(2, 8, 8), FLOAT32, Paged(16))


def test_odd_keys_in_bfloat16_are_refused_with_the_reason() -> None:
    with pytest.raises(LayoutMismatch, match=r"width 7 cannot be stored as bfloat16.*pairs along the width.*float16"):
        Layout(KeyValue(1, 7, 8), BFLOAT16, Paged(16))
    with pytest.raises(LayoutMismatch, match="13"):
        Layout(Latent(9, 4), BFLOAT16, Paged(16))
    assert Layout(KeyValue(1, 7, 8), FLOAT16, Paged(16)).bytes_per_token == 30
    # Values lie in pairs of positions, so their width may be odd.
    assert Layout(KeyValue(1, 8, 7), BFLOAT16, Paged(16)).bytes_per_token == 30


def test_types_without_a_block_format_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="int8 has no block format yet: use one of float32, bfloat16, float16"):
        Layout(KeyValue(1, 8, 8), INT8, Paged(16))


@pytest.mark.parametrize("rows", [(0, 8, 8), (1, 0, 8), (1, 8, -1)])
def test_rows_that_hold_nothing_are_refused(rows: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="must be 1 or more"):
        KeyValue(*rows)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=lambda d: d.name)
@pytest.mark.parametrize("block_size", [16, 64])
def test_element_addresses_are_where_the_kernels_format_writes(dtype: DType, block_size: int) -> None:
    # Two descriptions of one format, byte addresses here and torch views there, must name the same bytes.
    rows = KeyValue(3, 6, 10)
    layout = Layout(rows, dtype, Paged(block_size))
    pool = Pool((Group(0, (0,), layout),), (2,), poison=True)
    store = LayerStore(pool.data(0), dtype, block_size, 3, 6, 10, 0)
    tokens = 2 * block_size
    k = torch.randn(tokens, 3, 6).to(torch_dtype(dtype))
    v = torch.randn(tokens, 3, 10).to(torch_dtype(dtype))
    write_kv(store, torch.tensor([1, 0], dtype=torch.int32), torch.arange(tokens), k, v)
    data = pool.data(0)

    def element(position: int, offset: int) -> torch.Tensor:
        block = [1, 0][position // block_size]
        return data[block, offset : offset + dtype.bytes].clone().view(torch_dtype(dtype))[0]

    seen = set()
    for position in range(tokens):
        index, slot = locate(position, block_size)
        for g in range(3):
            for d in range(6):
                at = layout.k_element(g, slot, d)
                assert element(position, at) == k[position, g, d]
                seen.add((index, at))
            for d in range(10):
                at = layout.v_element(g, slot, d)
                assert element(position, at) == v[position, g, d]
                seen.add((index, at))
    # Every byte of both blocks is some element's, and no two share one.
    assert len(seen) * dtype.bytes == 2 * layout.block_bytes
    assert kernel_elements_per_pair(dtype) == elements_per_pair(dtype)


def test_addresses_outside_a_block_are_refused() -> None:
    layout = Layout(KeyValue(2, 4, 4), FLOAT32, Paged(16))
    for call in (
        lambda: layout.k_element(2, 0, 0),
        lambda: layout.k_element(0, 16, 0),
        lambda: layout.k_element(0, 0, 4),
        lambda: layout.v_element(0, -1, 0),
        lambda: locate(-1, 16),
    ):
        with pytest.raises(UsageError):
            call()


def test_groups_share_a_table_only_when_rows_and_window_agree() -> None:
    groups = groups_of(spec(heads(window=8), heads(), heads(window=8), heads(window=4), heads(1)), FLOAT32, 16)
    assert [(g.index, g.layers, g.window) for g in groups] == [
        (0, (0, 2), 8),
        (1, (1,), None),
        (2, (3,), 4),
        (3, (4,), None),
    ]
    assert [g.bytes_per_block for g in groups] == [2 * 16 * 128, 16 * 128, 16 * 128, 16 * 64]
    assert bytes_per_token(groups) == 4 * 128 + 64


def test_144_caches_of_a_small_model_are_one_group() -> None:
    (group,) = groups_of(spec(*[Attention(12, 12, 64, 64, 0.125)] * 12), FLOAT32, 16)
    assert group.layers == tuple(range(12))
    assert group.bytes_per_token == 73_728


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256, 1024])
def test_block_sizes_that_kernels_read(block_size: int) -> None:
    check_block_size(block_size)


@pytest.mark.parametrize("block_size", [-16, 0, 1, 4, 24, 48, 96, 192])
def test_block_sizes_that_kernels_do_not_read(block_size: int) -> None:
    with pytest.raises(UsageError, match=f"block size {block_size} .*use 16, 32, 64, 128"):
        check_block_size(block_size)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_blocks_spanned_is_the_maximum_over_all_beginnings(block_size: int) -> None:
    for n in range(60):
        worst = max(len({p // block_size for p in range(begin, begin + n)}) for begin in range(block_size))
        assert blocks_spanned(n, block_size) == worst


@pytest.mark.parametrize(
    ("capacity", "sinks", "block_size", "chunk"), [(8, 4, 4, 1), (7, 0, 4, 5), (20, 3, 4, 9), (9, 5, 4, 2)]
)
def test_a_ring_never_overwrites_what_a_chunk_still_sees(
    capacity: int, sinks: int, block_size: int, chunk: int
) -> None:
    ring = Ring(capacity, sinks, block_size, chunk)
    for begin in range(80):
        seen = {p for p in range(begin, begin + chunk) for p in range(max(0, p - ring.window + 1), p + 1)}
        indices = {p // block_size for p in seen | set(range(sinks))}
        assert len({ring.block(i) for i in indices}) == len(indices)
        assert all(0 <= ring.block(i) < ring.num_blocks for i in indices)


def test_sinks_of_a_ring_stay_in_blocks_of_their_own() -> None:
    ring = Ring(12, 5, 4, 1)
    assert ring.sink_blocks == 2
    assert {ring.block(i) for i in range(2)} == {0, 1}
    assert {ring.block(i) for i in range(2, 50)} == set(range(2, ring.num_blocks))


@pytest.mark.parametrize(("capacity", "sinks"), [(4, 4), (4, 5), (4, -1), (0, 0)])
def test_rings_that_keep_nothing_new_are_refused(capacity: int, sinks: int) -> None:
    with pytest.raises(UsageError, match=f"{capacity} rows cannot keep {sinks} sinks"):
        Ring(capacity, sinks, 4)


def test_contiguous_is_one_block() -> None:
    group = Group(0, (0,), Layout(KeyValue(1, 4, 4), FLOAT32, Contiguous(128)))
    assert [group.blocks_for(ctx, 8) for ctx in (1, 128)] == [1, 1]


def test_a_group_refuses_a_window_that_sees_nothing_or_contradicts_its_ring() -> None:
    layout = Layout(KeyValue(1, 4, 4), FLOAT32, Ring(8, 2, 4))
    with pytest.raises(UsageError, match="newest 6 keys, but the group's window is 8"):
        Group(0, (0,), layout, 8)
    with pytest.raises(UsageError, match="window of 0"):
        Group(0, (0,), Layout(KeyValue(1, 4, 4), FLOAT32, Paged(4)), 0)
    with pytest.raises(UsageError, match="no layers"):
        Group(0, (), Layout(KeyValue(1, 4, 4), FLOAT32, Paged(4)))
