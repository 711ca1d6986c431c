"""The attention judge against torch's own attention with a mask that is spelled out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvist.base.errors import VerifyError
from kvist.verify.compare import JUDGE, assert_close
from kvist.verify.plain import plain_attention, visible_positions


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (1, 0), (4, 0), (4, 2), (50, 3)])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (8, 1), (6, 3), (7, 7)])
def test_equals_torch_attention(heads, groups, window, sinks):
    n, count = 23, 9
    q, k = torch.randn(count, heads, 6).double(), torch.randn(n, groups, 6).double()
    v = torch.randn(n, groups, 5).double()
    mask = torch.zeros(count, n, dtype=torch.bool)
    for row, position in enumerate(range(n - count, n)):
        for key in range(n):
            young = window is None or position - key < window
            mask[row, key] = key <= position and (young or key < sinks)
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, scale=0.7, enable_gqa=True
    ).transpose(0, 1)
    got = plain_attention(q, k, v, range(n - count, n), window, sinks, scale=0.7)
    assert_close(got, expected, JUDGE)


def test_soft_cap_bounds_scores():
    q, k, v = torch.tensor([[[1.0]]]), torch.tensor([[[0.0]], [[1e6]]]), torch.tensor([[[0.0]], [[1.0]]])
    got = plain_attention(q, k, v, [1], softcap=2.0)
    assert_close(got, torch.sigmoid(torch.tensor([[[2.0]]], dtype=torch.float64)), JUDGE)


def test_positions_by_hand():
    assert visible_positions(5) == [0, 1, 2, 3, 4, 5]
    assert visible_positions(5, window=2) == [4, 5]
    assert visible_positions(5, window=2, sinks=1) == [0, 4, 5]
    assert visible_positions(5, window=2, sinks=9) == [0, 1, 2, 3, 4, 5]
    assert visible_positions(1, window=4, sinks=1) == [0, 1]
    assert visible_positions(0, window=1) == [0]
    assert visible_positions(-1) == visible_positions(3, window=0) == []


def test_what_is_not_seen_is_not_touched_and_nothing_seen_gives_zeros():
    q, k, v = torch.randn(2, 1, 4), torch.randn(6, 1, 4), torch.randn(6, 1, 4)
    k[[0, 1, 4, 5]] = torch.nan
    v[[0, 1, 4, 5]] = torch.nan
    got = plain_attention(q, k, v, [3, -1], window=2)
    assert got[0].isfinite().all() and not got[1].any()
    with pytest.raises(VerifyError, match="position 6"):
        plain_attention(q, k, v, [3, 6])
    with pytest.raises(VerifyError, match="fit"):
        plain_attention(torch.randn(2, 3, 4), torch.randn(6, 2, 4), torch.randn(6, 2, 4), [0, 1])
