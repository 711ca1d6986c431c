"""The chapter's values out of the package's own cache: float32, the reference kernels."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kvist.kernels.latent import compress, expand
from kvist.kernels.reference import ReferenceBackend
from kvist.layer import LayerCache
from kvist.verify.compare import ATTEND, assert_bits_equal, assert_close

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "chapter.json").read_text())
F = np.float32


class Generator:
    """The C runtime's linear congruential generator that the chapter draws its weights from."""

    def __init__(self, seed: int = 42) -> None:
        self.state = seed

    def draw(self, limit: float) -> np.float32:
        self.state = (self.state * 214013 + 2531011) % 2**32
        return (F((self.state >> 16) & 0x7FFF) / F(32767) * F(2) - F(1)) * F(limit)

    def matrices(self, count: int, rows: int, columns: int, limit: float) -> list[np.ndarray]:
        """``count`` matrices drawn element by element in turn."""
        drawn = np.array([[[self.draw(limit) for _ in range(count)] for _ in range(columns)] for _ in range(rows)])
        return [np.ascontiguousarray(drawn[:, :, m]) for m in range(count)]


def product(matrix: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Rows of ``matrix`` times ``x``, each sum in index order in float32."""
    total = np.zeros(matrix.shape[0], F)
    for i in range(matrix.shape[1]):
        total = total + matrix[:, i] * x[i]
    return total


def attend_in_order(cache: LayerCache, q: np.ndarray) -> np.ndarray:
    """The chapter's loop over what the cache hands out: scores = K q, softmax, out = V p."""
    scores = product(cache.retrieve_k(0).numpy(), q) * F(1 / math.sqrt(len(q)))
    weights = np.array([F(math.exp(s - scores.max())) for s in scores])
    total = F(0)
    for weight in weights:
        total = total + weight
    return product(cache.retrieve_v(0).numpy(), weights / total)


def digits(values: np.ndarray | torch.Tensor, form: str = ".9g") -> list[str]:
    return [format(float(value), form) for value in values]


def single_head() -> tuple[LayerCache, list[np.ndarray], list[torch.Tensor], list[tuple[int, int]], int]:
    """(cache, outputs in index order, outputs of the kernels, lengths, projections) of the six-token decoder."""
    generator = Generator()
    wq, wk, wv = generator.matrices(3, 4, 6, 0.2)
    (wo,) = generator.matrices(1, 6, 4, 0.2)
    cache = LayerCache(1, 4, capacity=6, backend=ReferenceBackend(), poison=True)
    in_order, kernels, lengths, projections = [], [], [], 0
    for pos, token in enumerate(GOLDEN["single_head_decode"]["tokens"]):
        x, before = np.array(token, F), len(cache)
        q = product(wq, x)
        cache.store_k(0, pos, torch.from_numpy(product(wk, x)))
        cache.store_v(0, pos, torch.from_numpy(product(wv, x)))
        projections += 1
        lengths.append((before, len(cache)))
        in_order.append(product(wo, attend_in_order(cache, q)))
        kernels.append(torch.from_numpy(wo) @ cache.attend(torch.from_numpy(q)[None])[0])
    return cache, in_order, kernels, lengths, projections


def test_single_head_decoder_to_all_nine_digits() -> None:
    cache, in_order, _, lengths, projections = single_head()
    golden = GOLDEN["single_head_decode"]
    assert lengths == [(s["len_before"], s["len_after"]) for s in golden["steps"]]
    assert [digits(out) for out in in_order] == [digits(s["output"]) for s in golden["steps"]]
    assert projections == golden["cached_projections"] == 6
    assert sum(range(1, projections + 1)) == golden["uncached_projections"] == 21
    assert cache.retrieve_k(0).numel() + cache.retrieve_v(0).numel() == golden["floats_held"] == 48


def test_single_head_decoder_through_the_kernels() -> None:
    # A split normalises after the sum over values, the chapter before it: equal in value, and in the digits of a print.
    _, _, kernels, _, _ = single_head()
    for out, step in zip(kernels, GOLDEN["single_head_decode"]["steps"], strict=True):
        assert digits(out, ".6f") == digits(step["output"], ".6f")
        assert_close(out, torch.tensor(step["output"]), ATTEND, step["word"])


def projected() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v ``[4, 1, 3]`` of the cached-against-recomputed table."""
    weights = Generator().matrices(3, 3, 4, 0.3)
    rows = [[product(w, np.array(x, F)) for x in GOLDEN["cached_vs_recomputed"]["X"]] for w in weights]
    q, k, v = (torch.from_numpy(np.array(r))[:, None] for r in rows)
    return q, k, v


@pytest.mark.parametrize("addressing", ["paged", "contiguous", "ring"])
def test_cached_equals_recomputed_in_every_bit(addressing: str) -> None:
    q, k, v = projected()
    backend = ReferenceBackend()
    cached = LayerCache(1, 3, capacity=8, addressing=addressing, backend=backend, poison=True)
    for row in GOLDEN["cached_vs_recomputed"]["rows"]:
        pos = row["pos"]
        cached.append(k[pos : pos + 1], v[pos : pos + 1])
        recomputed = LayerCache(1, 3, capacity=8, addressing=addressing, backend=backend, poison=True)
        recomputed.append(k[: pos + 1], v[: pos + 1])
        assert_bits_equal(cached.attend(q[pos]), recomputed.attend(q[pos]), f"position {pos}")
        out = attend_in_order(cached, q[pos, 0].numpy())
        assert digits(out) == digits(row["cached"]) == digits(row["full"])
        assert digits(cached.attend(q[pos])[0], "+.4f") == digits(row["cached"], "+.4f")
        assert_close(cached.attend(q[pos])[0], torch.tensor(row["full"]), ATTEND, f"position {pos}")
    assert digits(cached.attend(q[3])[0], "+.4f") == ["+0.0398", "-0.1019", "+0.0901"]


def test_latent_to_all_nine_digits() -> None:
    golden = GOLDEN["latent"]
    generator = Generator()
    (w_dkv,) = generator.matrices(1, 16, 64, 0.1)
    w_uk, w_uv = generator.matrices(2, 64, 16, 0.1)
    h = torch.tensor([[generator.draw(0.5) for _ in range(64)]])
    c_kv = compress(h, torch.from_numpy(w_dkv))
    k, v = expand(c_kv, torch.from_numpy(w_uk).view(8, 8, 16), torch.from_numpy(w_uv).view(8, 8, 16))
    assert digits(c_kv[0]) == digits(golden["c_kv"])
    assert digits(k.flatten()) == digits(golden["K"])
    assert digits(v.flatten()) == digits(golden["V"])
