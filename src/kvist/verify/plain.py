"""Attention judged from outside: float64, by picking out the visible keys, without a mask.

Shares no masking or position code with the kernels: each query lists the positions it may see as plain integers, takes
those rows and no others, and does one softmax over them. What a query does not see is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvist.base.errors import VerifyError


def visible_positions(position: int, window: int | None = None, sinks: int = 0) -> list[int]:
    """Positions that the query at ``position`` sees, ascending: the sinks, and the last ``window``, itself included."""
    if window is None:
        return list(range(position + 1))
    recent = range(max(position + 1 - window, 0), position + 1)
    return [*range(min(sinks, recent.start)), *recent]


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Sequence[int],
    window: int | None = None,
    sinks: int = 0,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Attention of q [T, H, D] at ``positions`` over k [n, G, D] and v [n, G, Dv] as float64 [T, H, Dv].

    Row j of k and v is position j. A query that sees nothing gives zeros.
    Raises VerifyError when heads do not divide or a visible row is not given.
    """
    heads, groups = q.shape[1], k.shape[1]
    if heads % groups or v.shape[:2] != k.shape[:2] or len(positions) != len(q):
        raise VerifyError(
            f"q {list(q.shape)} at {len(positions)} positions, k {list(k.shape)} and v {list(v.shape)} do not fit"
        )
    out = torch.zeros(len(q), heads, v.shape[2], dtype=torch.float64)
    for t, position in enumerate(positions):
        picked = visible_positions(position, window, sinks)
        if not picked:
            continue
        if picked[-1] >= len(k):
            raise VerifyError(
                f"the query at position {position} sees position {picked[-1]}, but only {len(k)} are given"
            )
        keys, values = k[picked].double(), v[picked].double()
        for head in range(heads):
            group = head * groups // heads
            scores = keys[:, group] @ q[t, head].double() * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            out[t, head] = torch.softmax(scores, 0) @ values[:, group]
    return out
