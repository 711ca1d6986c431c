"""B19: a ring that has wrapped cannot go back: the rows that an older query needs are gone."""

from __future__ import annotations

import pytest
import torch

from kvist.base.errors import NotResident
from kvist.kernels.dispatch import best_backend
from kvist.kernels.ops import Backend
from kvist.kernels.reference import ReferenceBackend
from kvist.layer import LayerCache
from kvist.verify.compare import assert_bits_equal


@pytest.fixture(params={b.name: b for b in (ReferenceBackend(), best_backend())}.values(), ids=lambda b: b.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


KINDS = {
    "ring": {"addressing": "ring"},
    "window": {"addressing": "paged", "capacity": 4000},
}


def cache(backend: Backend, kind: str, size: int, chunk: int = 512) -> LayerCache:
    settings: dict[str, object] = {"capacity": size, **KINDS[kind]}
    if kind == "window":
        settings["window"] = size
    return LayerCache(1, 4, chunk=chunk, backend=backend, poison=True, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back_to", [19, 17, 12, 5, 1])
def test_going_back_is_refused_with_the_numbers(backend: Backend, kind: str, back_to: int) -> None:
    c = cache(backend, kind, 8)
    k, v = torch.randn(20, 1, 4), torch.randn(20, 1, 4)
    for i in range(20):
        c.append(k[i : i + 1], v[i : i + 1])
    needed = max(0, back_to - 7)
    with pytest.raises(NotResident, match=f"from 20 to {back_to} tokens.*from {needed} on.*newest 8 kept begin at 12"):
        c.truncate(back_to)
    assert (c.seen, len(c), c.positions) == (20, 8, list(range(12, 20)))
    assert torch.equal(c.retrieve_k(0), k[12:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_recomputing_after_the_refusal_equals_a_cold_run(backend: Backend, kind: str) -> None:
    k, v, q = torch.randn(25, 1, 4), torch.randn(25, 1, 4), torch.randn(25, 1, 4)
    warm, cold = cache(backend, kind, 8), cache(backend, kind, 8)
    warm.append(torch.randn(20, 1, 4), torch.randn(20, 1, 4))
    with pytest.raises(NotResident):
        warm.truncate(17)
    warm.truncate(0)
    for c in (warm, cold):
        c.append(k[:17], v[:17])
    for i in range(17, 22):
        for c in (warm, cold):
            c.append(k[i : i + 1], v[i : i + 1])
        assert_bits_equal(warm.attend(q[i]), cold.attend(q[i]), f"position {i}")
        assert warm.positions == cold.positions


@pytest.mark.parametrize("kind", KINDS)
def test_before_it_wraps_going_back_is_exact(backend: Backend, kind: str) -> None:
    k, v, q = torch.randn(12, 1, 4), torch.randn(12, 1, 4), torch.randn(12, 1, 4)
    warm, cold = cache(backend, kind, 8), cache(backend, kind, 8)
    warm.append(k[:8], v[:8])
    warm.truncate(5)
    cold.append(k[:5], v[:5])
    for i in range(5, 12):
        for c in (warm, cold):
            c.append(k[i : i + 1], v[i : i + 1])
        assert_bits_equal(warm.attend(q[i]), cold.attend(q[i]), f"position {i}")


@pytest.mark.parametrize("kind", KINDS)
def test_from_beyond_the_ring_to_within_it(backend: Backend, kind: str) -> None:
    c = cache(backend, kind, 1024)
    for n in (512, 512, 5):
        c.append(torch.zeros(n, 1, 4), torch.zeros(n, 1, 4))
    with pytest.raises(NotResident, match=r"from 1029 to 914 tokens.*begin at 5"):
        c.truncate(914)
    assert (c.seen, len(c)) == (1029, 1024)
