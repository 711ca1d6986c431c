"""B08: a window of N is N visible keys, the current one included: not N-1, not N+1."""

from __future__ import annotations

import pytest
import torch

from kvist.kernels.dispatch import best_backend
from kvist.kernels.ops import Backend
from kvist.kernels.reference import ReferenceBackend
from kvist.layer import LayerCache


@pytest.fixture(params={b.name: b for b in (ReferenceBackend(), best_backend())}.values(), ids=lambda b: b.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


KINDS = ["paged", "contiguous", "ring"]


def labelled(
    backend: Backend, window: int, addressing: str, tokens: int, chunk: int = 16
) -> tuple[LayerCache, torch.Tensor, torch.Tensor]:
    """A cache, and keys that all score alike with values that name their position: attention shows who was seen."""
    settings: dict[str, object] = (
        {"addressing": "ring", "capacity": window}
        if addressing == "ring"
        else {"addressing": addressing, "window": window, "capacity": tokens}
    )
    cache = LayerCache(1, 4, tokens, backend=backend, poison=True, chunk=chunk, **settings)  # type: ignore[arg-type]
    return cache, torch.zeros(tokens, 1, 4), torch.eye(tokens)[:, None]


def seen_by(out: torch.Tensor) -> list[int]:
    return torch.nonzero(out > 0)[:, 0].tolist()


@pytest.mark.parametrize("addressing", KINDS)
def test_prompt_of_six_then_four_singles_in_a_window_of_eight(backend: Backend, addressing: str) -> None:
    cache, k, v = labelled(backend, 8, addressing, 10)
    cache.append(k[:6], v[:6])
    for position in range(6, 10):
        cache.append(k[position : position + 1], v[position : position + 1])
        kept = list(range(max(0, position - 7), position + 1))
        assert cache.positions == kept
        assert seen_by(cache.attend(torch.ones(1, 4))[0]) == kept
        assert torch.equal(cache.retrieve_v(0), v[kept, 0].T)


@pytest.mark.parametrize("addressing", KINDS)
@pytest.mark.parametrize("window", [1, 4, 16, 128])
def test_visible_keys_of_each_query_around_the_edge(backend: Backend, window: int, addressing: str) -> None:
    for total in (window - 1, window, window + 1, 2 * window, 2 * window + 1):
        if total < 1:
            continue
        cache, k, v = labelled(backend, window, addressing, total, chunk=total)
        cache.append(k, v)
        out = cache.attend(torch.ones(total, 1, 4))
        i, j = torch.arange(total)[:, None], torch.arange(total)[None]
        assert torch.equal(out[:, 0] > 0, (j <= i) & (j > i - window))
        assert len(cache) == min(total, window)


@pytest.mark.parametrize("addressing", KINDS)
def test_ten_tokens_in_a_window_of_four(backend: Backend, addressing: str) -> None:
    cache, k, v = labelled(backend, 4, addressing, 10)
    cache.append(k, v)
    counts = [len(seen_by(row)) for row in cache.attend(torch.ones(10, 1, 4))[:, 0]]
    assert counts == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("window", [1024, 2048])
def test_a_large_window_across_its_edge(backend: Backend, window: int) -> None:
    cache = LayerCache(1, 2, 1, capacity=3 * window, window=window, backend=backend, poison=True)
    total = 0
    while total < window + 300:
        n = min(500, window + 300 - total)
        # A value is its position; the mean over the visible ones tells first and last.
        cache.append(torch.zeros(n, 1, 2), torch.arange(total, total + n, dtype=torch.float32)[:, None, None])
        total += n
    first = total - window
    assert cache.positions == list(range(first, total))
    assert float(cache.attend(torch.ones(1, 2))) == pytest.approx((first + total - 1) / 2, rel=1e-6)
