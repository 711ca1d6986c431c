"""B01: with a filled cache, the causal triangle is anchored at the last key, not at the first."""

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


ADDRESSINGS = ["paged", "contiguous", "ring"]


@pytest.mark.parametrize("addressing", ADDRESSINGS)
@pytest.mark.parametrize("q_len", [1, 2, 5])
def test_queries_stand_at_the_newest_positions(backend: Backend, addressing: str, q_len: int) -> None:
    cache = LayerCache(1, 4, capacity=8, addressing=addressing, chunk=8, backend=backend, poison=True)
    k, v, q = torch.randn(5, 1, 4), torch.randn(5, 1, 4), torch.randn(q_len, 1, 4)
    cache.append(k, v)
    out = cache.attend(q)
    for row in range(q_len):
        seen = 5 - q_len + row + 1
        weights = torch.softmax(k[:seen, 0].double() @ q[row, 0].double() / 2, 0)
        assert_close(out[row, 0], weights @ v[:seen, 0].double(), attend_bound("float32"))
    if q_len == 1:
        assert not torch.allclose(out[0, 0], v[0, 0])
