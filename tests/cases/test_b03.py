"""B03: the length is counted, never inferred from slots that are not zero."""

from __future__ import annotations

import pytest
import torch

from kvist.kernels.reference import ReferenceBackend
from kvist.layer import LayerCache


@pytest.mark.parametrize("addressing", ["paged", "contiguous", "ring"])
@pytest.mark.parametrize("zero", [{0}, {3}, {0, 1, 2, 3}], ids=["first", "last", "all"])
def test_zero_rows_are_rows(addressing: str, zero: set[int]) -> None:
    cache = LayerCache(2, 4, capacity=16, addressing=addressing, chunk=8, backend=ReferenceBackend())
    k, v = torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    for position in zero:
        k[position], v[position] = 0, 0
    cache.append(k[:4], v[:4])
    assert (cache.seen, len(cache)) == (4, 4)
    cache.append(k[4:], v[4:])
    assert (cache.seen, len(cache)) == (5, 5)
    for head in range(2):
        assert torch.equal(cache.retrieve_k(head), k[:, head])
        assert torch.equal(cache.retrieve_v(head), v[:, head].T)
