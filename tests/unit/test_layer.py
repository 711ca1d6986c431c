from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvist.base.errors import CacheError, KernelError, LayoutMismatch, NotResident, TooLong, UsageError
from kvist.kernels.dispatch import best_backend
from kvist.kernels.ops import TORCH_DTYPES, Backend
from kvist.kernels.reference import ReferenceBackend
from kvist.layer import LayerCache
from kvist.verify.compare import assert_bits_equal, assert_close, attend_bound

KINDS = [
    {"capacity": 80},
    {"capacity": 80, "addressing": "contiguous"},
    {"capacity": 300, "block_size": 128},
    {"capacity": 80, "window": 8},
    {"capacity": 80, "window": 17, "chunk": 7},
    {"capacity": 12, "addressing": "ring", "sinks": 4},
    {"capacity": 40, "addressing": "ring", "sinks": 20, "chunk": 5},
]
IDS = ["paged", "contiguous", "blocks-of-128", "window-8", "window-17", "ring-12", "ring-40"]


def cache(num_kv_heads: int = 2, head_dim: int = 8, v_head_dim: int = 6, **settings: object) -> LayerCache:
    settings = {"backend": ReferenceBackend(), "poison": True, **settings}
    return LayerCache(num_kv_heads, head_dim, v_head_dim, **settings)  # type: ignore[arg-type]


def rows(tokens: int, num_kv_heads: int = 2, head_dim: int = 8, v_head_dim: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, num_kv_heads, head_dim), torch.randn(tokens, num_kv_heads, v_head_dim)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: int) -> Tensor:
    """One scaled query and head at a time in float64, over the keys it may see: no cache, no blocks, no mask."""
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for t in range(q.shape[0]):
        seen = [j for j in range(t + 1) if window is None or t - j < window or j < sinks]
        for h in range(q.shape[1]):
            g = h * k.shape[1] // q.shape[1]
            scores = k[seen, g].double() @ q[t, h].double()
            out[t, h] = torch.softmax(scores, 0) @ v[seen, g].double()
    return out


@pytest.mark.parametrize(
    "backend", {b.name: b for b in (ReferenceBackend(), best_backend())}.values(), ids=lambda b: b.name
)
@pytest.mark.parametrize("dtype", list(TORCH_DTYPES))
@pytest.mark.parametrize("settings", KINDS, ids=IDS)
def test_attention_and_rows_of_every_kind(settings: dict[str, object], dtype: str, backend: Backend) -> None:
    c = cache(dtype=dtype, backend=backend, **settings)
    (k, v), q = rows(73), torch.randn(73, 4, 8)
    outs, done = [], 0
    for n in (1, 3, 5, 1, 5, 4, 5, 2, 5, 5, 5, 5, 1, 1, 5, 5, 5, 5, 5):
        c.append(k[done : done + n], v[done : done + n])
        outs.append(c.attend(q[done : done + n]))
        done += n
    assert done == c.seen == 73
    stored_k, stored_v = k.to(TORCH_DTYPES[dtype]), v.to(TORCH_DTYPES[dtype])
    # Over a bfloat16 store a query is rounded once, after its scale.
    scaled = (q / math.sqrt(8)).to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    assert_close(torch.cat(outs), plain_attention(scaled, stored_k, stored_v, c.window, c.sinks), attend_bound(dtype))
    assert (
        len(c)
        == c.resident
        == len(c.positions)
        == min(73, settings["capacity"], 73 if c.window is None else c.window + c.sinks)
    )
    for head in range(2):
        assert torch.equal(c.retrieve_k(head), stored_k[c.positions, head])
        assert torch.equal(c.retrieve_v(head), stored_v[c.positions, head].T)


@pytest.mark.parametrize("dtype", list(TORCH_DTYPES))
@pytest.mark.parametrize("settings", KINDS, ids=IDS)
def test_cell_by_cell_stores_the_same_bits_as_many_at_once(settings: dict[str, object], dtype: str) -> None:
    one, many = cache(dtype=dtype, **settings), cache(dtype=dtype, **settings)
    k, v = rows(30)
    for pos in range(30):
        for head in (1, 0):
            one.store_k(head, pos, k[pos, head])
            one.store_v(head, pos, v[pos, head])
        many.append(k[pos : pos + 1], v[pos : pos + 1])
        assert one.positions == many.positions
        assert torch.equal(one.retrieve_k(1), many.retrieve_k(1))
        assert torch.equal(one.retrieve_v(0), many.retrieve_v(0))


@pytest.mark.parametrize("chunk", [1, 3, 16, 17])
@pytest.mark.parametrize("sinks", [0, 1, 5, 16])
@pytest.mark.parametrize("window", [1, 2, 16, 21])
def test_a_ring_shows_its_mask_at_every_offset(window: int, sinks: int, chunk: int) -> None:
    """Once around the ring and on, chunk by chunk: keys all score alike, values name their position."""
    total = 3 * (window + sinks) + 40
    settings: dict[str, object] = {"capacity": window + sinks, "addressing": "ring", "sinks": sinks, "chunk": chunk}
    c = cache(1, 4, total, **settings, backend=best_backend(1))
    k, v = torch.zeros(total, 1, 4), torch.eye(total)[:, None]
    for start in range(0, total, chunk):
        stop = min(total, start + chunk)
        c.append(k[start:stop], v[start:stop])
        seen = c.attend(torch.ones(stop - start, 1, 4))[:, 0] > 0
        i, j = torch.arange(start, stop)[:, None], torch.arange(total)[None]
        assert torch.equal(seen, (j <= i) & ((j > i - window) | (j < sinks)))


def test_a_position_counts_only_when_all_heads_have_both() -> None:
    c = cache()
    k, v = rows(1)
    c.store_k(0, 0, k[0, 0])
    c.store_v(0, 0, v[0, 0])
    c.store_k(1, 0, k[0, 1])
    assert (c.seen, len(c), tuple(c.retrieve_k(0).shape)) == (0, 0, (0, 8))
    with pytest.raises(CacheError, match="position 0 is half written"):
        c.append(k, v)
    c.store_v(1, 0, v[0, 1])
    assert c.seen == 1


def test_heads_may_run_ahead_of_each_other() -> None:
    c = cache(window=4, chunk=6, capacity=100)
    k, v = rows(40)
    for begin in range(0, 40, 5):
        for head in range(2):
            for pos in range(begin, begin + 5):
                c.store_k(head, pos, k[pos, head])
                c.store_v(head, pos, v[pos, head])
    assert c.positions == [36, 37, 38, 39]
    assert torch.equal(c.retrieve_k(1), k[36:, 1])
    for pos in range(40, 46):
        c.store_k(0, pos, k[0, 0])
    with pytest.raises(TooLong, match="7 tokens at once exceed the 6"):
        c.store_k(0, 46, k[0, 0])


def test_a_cell_is_written_once_and_in_order() -> None:
    c = cache()
    k, v = rows(3)
    c.append(k[:2], v[:2])
    with pytest.raises(CacheError, match=r"key of head 1 at position 0 was written before.*next position is 2"):
        c.store_k(1, 0, k[0, 0])
    with pytest.raises(CacheError, match="value of head 0 at position 5 would leave a gap: its next position is 2"):
        c.store_v(0, 5, v[0, 0])
    assert torch.equal(c.retrieve_k(1), k[:2, 1])


def test_values_are_handed_out_as_a_view_where_the_layout_allows() -> None:
    c = cache(addressing="contiguous", capacity=100)
    k, v = rows(20)
    c.append(k[:10], v[:10])
    view = c.retrieve_v(1)
    held = view.clone()
    assert view.data_ptr() == c.retrieve_v(1).data_ptr()
    c.append(k[10:], v[10:])
    assert torch.equal(view, held)
    assert torch.equal(c.retrieve_v(1), v[:, 1].T)


def test_both_steps_of_attention_are_a_matrix_times_a_vector() -> None:
    c = cache(1, 8, 6)
    k, v = rows(9, 1)
    c.append(k, v)
    q = torch.randn(1, 8)
    p = torch.softmax(c.retrieve_k(0) @ q[0] / math.sqrt(8), 0)
    assert_close(c.attend(q)[0], c.retrieve_v(0) @ p, attend_bound("float32"))


def test_bytes_are_allocated_once() -> None:
    assert cache(capacity=33).nbytes == 3 * 16 * 2 * (8 + 6) * 4
    assert cache(capacity=33, addressing="contiguous").nbytes == 64 * 2 * (8 + 6) * 4
    assert cache(capacity=129, addressing="contiguous").nbytes == 256 * 2 * (8 + 6) * 4
    bounded = cache(capacity=10**9, window=20, chunk=4)
    before = bounded.nbytes
    for _ in range(50):
        bounded.append(*rows(4))
    assert bounded.nbytes == before == 3 * 16 * 2 * (8 + 6) * 4


def test_too_many_tokens_are_refused_and_change_nothing() -> None:
    c = cache(capacity=20)
    k, v = rows(21)
    c.append(k[:15], v[:15])
    with pytest.raises(TooLong, match="21 tokens exceed the cache's capacity of 20"):
        c.append(k[15:], v[15:])
    c.append(k[15:20], v[15:20])
    assert torch.equal(c.retrieve_k(0), k[:20, 0])


def test_queries_beyond_what_is_kept_are_refused() -> None:
    c = cache(window=4, chunk=16)
    c.append(*rows(16))
    c.append(*rows(16))
    c.append(*rows(16))
    with pytest.raises(NotResident, match="query at position 8 would see keys from 5 on, but everything before 16"):
        c.attend(torch.randn(40, 2, 8))
    with pytest.raises(UsageError, match="49 queries need 49 tokens in the cache, which has 48"):
        c.attend(torch.randn(49, 2, 8))


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda c: c.append(torch.zeros(2, 2, 7), torch.zeros(2, 2, 6)), UsageError),
        (lambda c: c.append(torch.zeros(2, 2, 8), torch.zeros(3, 2, 6)), UsageError),
        (lambda c: c.append(torch.zeros(2, 8), torch.zeros(2, 6)), UsageError),
        (lambda c: c.store_k(2, 0, torch.zeros(8)), UsageError),
        (lambda c: c.store_v(0, 0, torch.zeros(8)), UsageError),
        (lambda c: c.retrieve_k(-1), UsageError),
        (lambda c: c.attend(torch.zeros(1, 2, 7)), UsageError),
        (lambda c: c.attend(torch.zeros(1, 3, 8)), KernelError),
        (lambda c: c.truncate(-1), UsageError),
    ],
)
def test_misuse_is_refused_with_a_reason(act: object, error: type[Exception]) -> None:
    c = cache()
    c.append(*rows(1))
    with pytest.raises(error):
        act(c)  # type: ignore[operator]
    assert c.seen == 1


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"capacity": 0}, UsageError, "0 rows"),
        ({"dtype": "int8"}, UsageError, "use one of float32, bfloat16, float16"),
        ({"block_size": 24}, UsageError, "block size 24"),
        ({"sinks": 4}, UsageError, "4 sinks need addressing='ring'"),
        ({"addressing": "ring", "window": 4}, UsageError, "leave window=4 out"),
        ({"addressing": "ring", "capacity": 4, "sinks": 4}, UsageError, "4 rows cannot keep 4 sinks"),
        ({"addressing": "heap"}, UsageError, "use paged, contiguous or ring"),
        ({"window": 0}, UsageError, "window"),
        ({"head_dim": 7, "dtype": "bfloat16"}, LayoutMismatch, "7 is odd"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cache(**settings)


def test_without_a_choice_the_best_kernels_are_taken() -> None:
    chosen, named = LayerCache(2, 8, capacity=16), LayerCache(2, 8, capacity=16, backend=best_backend())
    k, q = torch.randn(9, 2, 8), torch.randn(9, 4, 8)
    for c in (chosen, named):
        c.append(k, k)
    assert_bits_equal(chosen.attend(q), named.attend(q))


def test_a_scale_of_ones_own() -> None:
    c = cache(1, 4, 4)
    k = torch.randn(6, 1, 4)
    c.append(k, k)
    q = torch.randn(1, 4)
    expected = torch.softmax(k[:, 0].double() @ q[0].double() * 0.3, 0) @ k[:, 0].double()
    assert_close(c.attend(q, scale=0.3)[0], expected, attend_bound("float32"))


@pytest.mark.parametrize(
    "backend", {b.name: b for b in (ReferenceBackend(), best_backend())}.values(), ids=lambda b: b.name
)
@pytest.mark.parametrize("dtype", list(TORCH_DTYPES))
@pytest.mark.parametrize("settings", KINDS, ids=IDS)
def test_latent_rows(settings: dict[str, object], dtype: str, backend: Backend) -> None:
    """One row for all heads, whose beginning is the value: stored once, read twice, in every kind of cache."""
    rank, width = 6, 10
    c = cache(1, width, rank, value_in_key=True, dtype=dtype, backend=backend, **settings)
    wide = cache(1, width, rank, dtype=dtype, backend=backend, **settings)
    assert c.nbytes * (width + rank) == wide.nbytes * width
    row, q = torch.randn(41, 1, width), torch.randn(41, 3, width)
    outs = []
    for t in range(41):
        c.store_k(0, t, row[t, 0]) if t % 2 else c.append(row[t : t + 1])
        outs.append(c.attend(q[t], scale=0.3))
    assert c.seen == 41
    stored = row.to(TORCH_DTYPES[dtype])
    scaled = (q * 0.3).to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    right = plain_attention(scaled, stored, stored[..., :rank], c.window, c.sinks)
    assert_close(torch.stack(outs), right, attend_bound(dtype))
    assert torch.equal(c.retrieve_k(0), stored[c.positions, 0])
    assert torch.equal(c.retrieve_v(0), stored[c.positions, 0, :rank].T)


def test_what_latent_rows_are_not() -> None:
    c = cache(1, 10, 6, value_in_key=True, capacity=20)
    c.append(torch.zeros(1, 1, 10))
    with pytest.raises(CacheError, match="part of its key"):
        c.store_v(0, 1, torch.zeros(6))
    with pytest.raises(UsageError, match="they lie in the keys"):
        c.append(torch.zeros(1, 1, 10), torch.zeros(1, 1, 6))
    with pytest.raises(UsageError, match="left out are not"):
        cache(1, 10, 6).append(torch.zeros(1, 1, 10))
    with pytest.raises(UsageError, match="scale of the expanded key"):
        c.attend(torch.zeros(3, 10))
    with pytest.raises(UsageError, match="num_kv_heads=1"):
        cache(2, 10, 6, value_in_key=True)
    with pytest.raises(UsageError, match="qk_rope_head_dim is -1"):
        cache(1, 10, 11, value_in_key=True)
    c.truncate(0)
    assert c.seen == 0
