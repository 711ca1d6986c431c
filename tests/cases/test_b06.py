"""B06: tokens seen and rows kept are two numbers; positions stay absolute."""

from __future__ import annotations

import pytest
import torch

from kvist.kernels.dispatch import best_backend
from kvist.kernels.ops import Backend
from kvist.kernels.reference import ReferenceBackend
from kvist.layer import LayerCache
from kvist.verify.compare import assert_close, attend_bound


@pytest.fixture(params={b.name: b for b in (ReferenceBackend(), best_backend())}.values(), ids=lambda b: b.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


def test_four_sinks_and_the_newest_four(backend: Backend) -> None:
    cache = LayerCache(1, 4, capacity=8, addressing="ring", sinks=4, backend=backend, poison=True)
    k, v = torch.randn(25, 1, 4), torch.randn(25, 1, 4)
    cache.append(k[:20], v[:20])
    assert (cache.seen, cache.resident, cache.start) == (20, 8, 16)
    assert cache.positions == [0, 1, 2, 3, 16, 17, 18, 19]
    for position in range(20, 25):
        cache.append(k[position : position + 1], v[position : position + 1])
        q = torch.randn(1, 4)
        kept = cache.positions
        assert kept == [0, 1, 2, 3, *range(position - 3, position + 1)]
        assert (cache.seen, cache.resident) == (position + 1, 8)
        weights = torch.softmax(k[kept, 0].double() @ q[0].double() / 2, 0)
        assert_close(cache.attend(q)[0], weights @ v[kept, 0].double(), attend_bound("float32"))


def test_a_long_prompt_under_a_small_budget(backend: Backend) -> None:
    cache = LayerCache(1, 4, capacity=500, addressing="ring", sinks=4, chunk=512, backend=backend)
    for begin in range(0, 3952, 512):
        n = min(512, 3952 - begin)
        cache.append(torch.randn(n, 1, 4), torch.randn(n, 1, 4))
    assert (cache.seen, cache.resident) == (3952, 500)
    cache.append(torch.randn(1, 1, 4), torch.randn(1, 1, 4))
    # The next input is one token at position 3952; what is kept stays at its budget.
    assert (cache.seen, cache.resident, cache.positions[-1]) == (3953, 500, 3952)
