"""B35: query head h reads kv head h // (H / G), never h % G."""

from __future__ import annotations

import pytest
import torch

from kvist.base.errors import KernelError
from kvist.kernels.dispatch import best_backend
from kvist.kernels.ops import Backend
from kvist.kernels.reference import ReferenceBackend
from kvist.layer import LayerCache


@pytest.fixture(params={b.name: b for b in (ReferenceBackend(), best_backend())}.values(), ids=lambda b: b.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


def read_by(backend: Backend, num_heads: int, num_kv_heads: int, dtype: str, tokens: int = 1) -> list[float]:
    cache = LayerCache(num_kv_heads, 4, dtype=dtype, capacity=64, backend=backend, poison=True)
    v = torch.arange(1.0, num_kv_heads + 1)[None, :, None].expand(tokens, -1, 4)
    cache.append(torch.randn(tokens, num_kv_heads, 4), v)
    out = cache.attend(torch.randn(num_heads, 4))
    assert out.shape == (num_heads, 4)
    return out[:, 0].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (8, 1), (6, 3), (7, 7), (32, 8)])
def test_heads_of_a_group_are_neighbours(backend: Backend, num_heads: int, num_kv_heads: int, dtype: str) -> None:
    # With one key the softmax is exactly 1, so the output is the value of the kv head that was read.
    expected = [float(1 + h // (num_heads // num_kv_heads)) for h in range(num_heads)]
    assert read_by(backend, num_heads, num_kv_heads, dtype) == expected


def test_many_keys_mix_only_the_right_heads_values(backend: Backend) -> None:
    # All keys of a kv head carry the same value, so any mixture of them is that value up to rounding.
    assert read_by(backend, 6, 3, "float32", tokens=40) == pytest.approx([1, 1, 2, 2, 3, 3], rel=1e-6)


def test_four_over_two_is_one_one_two_two(backend: Backend) -> None:
    assert read_by(backend, 4, 2, "float32") == [1, 1, 2, 2]


def test_heads_that_cannot_be_shared_out_are_refused(backend: Backend) -> None:
    cache = LayerCache(4, 4, capacity=16, backend=backend)
    cache.append(torch.zeros(1, 4, 4), torch.zeros(1, 4, 4))
    with pytest.raises(KernelError, match="6 query heads cannot be shared out evenly over 4 kv heads"):
        cache.attend(torch.zeros(1, 6, 4))


def test_stored_bytes_follow_the_kv_heads() -> None:
    assert LayerCache(8, 64, capacity=64).nbytes == 64 * 2 * 8 * 64 * 4
