"""What the book's worked examples are made of: its weights, its sentence, and its arithmetic in index order.

A sum in index order is one fixed chain of float32 additions, so a row's result never depends on how many rows are
computed with it, and the digits are those that a plain loop in any language prints.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvist.base.errors import UsageError
from kvist.kernels.latent import compress
from kvist.model.decoder import rope_table
from kvist.spec.model import Rope

_SENTENCE = (
    ("The", (0.5, -0.2, 0.8, 0.1, -0.3, 0.6)),
    ("cat", (0.3, 0.7, 0.1, -0.2, 0.5, 0.4)),
    ("sat", (-0.1, 0.4, 0.6, 0.3, -0.4, 0.2)),
    ("on", (0.2, -0.3, 0.5, 0.6, 0.1, -0.5)),
    ("the", (0.8, 0.2, -0.1, 0.4, 0.3, 0.6)),
    ("mat", (-0.4, 0.1, 0.3, -0.2, 0.7, 0.5)),
)


def sentence(width: int = 6) -> list[tuple[str, Tensor]]:
    """The six words, each with the first ``width`` channels of its embedding."""
    return [(word, torch.tensor(channels[:width])) for word, channels in _SENTENCE]


class Generator:
    """Weights as the book draws them: a linear congruential generator of 15 bits, as C runtimes had one."""

    def __init__(self, seed: int = 42) -> None:
        """Start from ``seed``."""
        self._state = seed

    def draw(self, limit: float) -> float:
        """The next value, uniform in -limit..limit, in float32 steps."""
        self._state = (self._state * 214013 + 2531011) % 2**32
        unit = np.float32(self._state >> 16 & 0x7FFF) / np.float32(32767)
        return float((unit * np.float32(2) - np.float32(1)) * np.float32(limit))

    def vector(self, length: int, limit: float) -> Tensor:
        """``[length]`` values."""
        return torch.tensor([self.draw(limit) for _ in range(length)])

    def matrices(self, count: int, rows: int, columns: int, limit: float) -> tuple[Tensor, ...]:
        """``count`` matrices ``[rows, columns]``, drawn together element by element: W_Q[0][0], W_K[0][0], ..."""
        drawn = self.vector(rows * columns * count, limit).view(rows, columns, count)
        return tuple(drawn[:, :, m].contiguous() for m in range(count))


def product(w: Tensor, x: Tensor) -> Tensor:
    """W x: ``[N]`` of w ``[N, K]`` and x ``[K]``, or ``[T, N]`` of rows x ``[T, K]``; every sum in index order."""
    return compress(x[None], w)[0] if x.dim() == 1 else compress(x, w)


def softmax(scores: Tensor) -> Tensor:
    """Probabilities ``[n]`` of scores ``[n]``: each exponential rounded once, their sum in index order."""
    weights = torch.exp((scores - scores.max()).double()).float()
    return weights / product(weights[None], torch.ones_like(weights))


def rotate(x: Tensor, positions: int | Tensor, theta: float = 10000.0) -> Tensor:
    """x ``[..., D]`` turned by rotary position embedding: all rows at one position, or row t at ``positions[t]``.

    Channel i pairs with i + D/2. UsageError for an odd width.
    """
    width = x.shape[-1]
    if width % 2:
        raise UsageError(f"rotary embedding turns pairs of channels: a width of {width} is odd, use an even one")
    at = torch.as_tensor(positions)
    cos, sin = (table[at] for table in rope_table(Rope(theta, width), int(at.max()) + 1))
    first, second = x[..., : width // 2], x[..., width // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two float32 tensors have the same shape and bits: 0.0 is not -0.0, and a NaN equals itself."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal shapes and values within torch's own default tolerance for their type."""
    try:
        torch.testing.assert_close(a, b)
    except AssertionError:
        return False
    return True


def prose() -> str:
    """A long English text that every Python carries: the help topics of its standard library."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))
