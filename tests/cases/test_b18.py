"""B18: crop to zero, beyond the end, by a negative number; nothing of the old tail is readable."""

from __future__ import annotations

import pytest
import torch

from kvist.base.errors import UsageError
from kvist.kernels.dispatch import best_backend
from kvist.kernels.ops import Backend
from kvist.kernels.reference import ReferenceBackend
from kvist.layer import LayerCache
from kvist.verify.compare import assert_bits_equal


@pytest.fixture(params={b.name: b for b in (ReferenceBackend(), best_backend())}.values(), ids=lambda b: b.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


KINDS = [
    {"addressing": "paged"},
    {"addressing": "contiguous"},
    {"addressing": "paged", "window": 12},
    {"addressing": "ring", "sinks": 2},
]


def filled(backend: Backend, tokens: int, settings: dict[str, object]) -> tuple[LayerCache, torch.Tensor]:
    cache = LayerCache(2, 4, capacity=16, chunk=16, backend=backend, poison=True, **settings)  # type: ignore[arg-type]
    rows = torch.arange(tokens, dtype=torch.float32)[:, None, None].expand(tokens, 2, 4)
    cache.append(rows, rows)
    return cache, rows


@pytest.mark.parametrize("settings", KINDS, ids=str)
@pytest.mark.parametrize(("keep", "left"), [(0, 0), (1, 1), (3, 3), (5, 3)])
def test_keep(backend: Backend, settings: dict[str, object], keep: int, left: int) -> None:
    cache, rows = filled(backend, 3, settings)
    cache.truncate(keep)
    assert (cache.seen, len(cache)) == (left, left)
    for head in range(2):
        assert torch.equal(cache.retrieve_k(head), rows[:left, head])
        assert torch.equal(cache.retrieve_v(head), rows[:left, head].T)


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_removing_more_than_there_is_is_an_error(backend: Backend, settings: dict[str, object]) -> None:
    cache, _ = filled(backend, 3, settings)
    with pytest.raises(UsageError, match="cut to -2 tokens"):
        cache.truncate(cache.seen - 5)
    assert cache.seen == 3


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_removing_a_negative_number_never_grows(backend: Backend, settings: dict[str, object]) -> None:
    cache, rows = filled(backend, 10, settings)
    cache.truncate(cache.seen - -5)
    assert (cache.seen, len(cache)) == (10, 10)
    assert torch.equal(cache.retrieve_k(0), rows[:, 0])


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_the_old_tail_is_gone_from_every_accessor(backend: Backend, settings: dict[str, object]) -> None:
    cache, _ = filled(backend, 3, settings)
    cache.truncate(2)
    nine = torch.full((1, 2, 4), 9.0)
    q = torch.randn(1, 2, 4)
    fresh, _ = filled(backend, 2, settings)
    assert_bits_equal(cache.attend(q), fresh.attend(q))
    for c in (cache, fresh):
        c.append(nine, nine)
    assert cache.retrieve_k(1)[:, 0].tolist() == [0, 1, 9]
    assert cache.retrieve_v(1)[0].tolist() == [0, 1, 9]
    assert_bits_equal(cache.attend(q), fresh.attend(q))


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_cells_stored_ahead_are_forgotten_too(backend: Backend, settings: dict[str, object]) -> None:
    cache, _ = filled(backend, 3, settings)
    cache.store_k(0, 3, torch.ones(4))
    cache.truncate(3)
    cache.store_k(0, 3, torch.full((4,), 7.0))
    for head in range(2):
        if head:
            cache.store_k(head, 3, torch.full((4,), 7.0))
        cache.store_v(head, 3, torch.full((4,), 7.0))
    assert cache.retrieve_k(0)[:, 0].tolist() == [0, 1, 2, 7]


def test_a_freed_block_is_erased_before_anyone_else_gets_it(backend: Backend) -> None:
    cache, _ = filled(backend, 16, {"addressing": "paged", "block_size": 16})
    cache.truncate(0)
    assert cache._pool.data(0).view(torch.float32).isnan().all()
