"""Attention over stored blocks, written to be read: one request at a time, one split of 128 keys after the other.

What is fixed here is what every kernel must do (ops.Attend):

- A split covers 128 absolute positions and has its own maximum and sum; splits are merged in ascending order.
- Visible scores are clamped to the finite range of the compute type, so that an infinite score takes all the weight
  instead of making inf - inf; NaN stays NaN.
- Invisible lanes are removed by select: their score is never in a maximum, their probability is exactly 0, and their
  value is never multiplied (0 x NaN is NaN, and what lies there may be anything).
- Over a bfloat16 store the probabilities are rounded to bfloat16, in float32 mode only: the float64 mode is the judge
  and rounds nothing.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kvist.base.dtypes import BFLOAT16
from kvist.base.errors import NotResident
from kvist.kernels.blockformat import blocks_at, read_k, read_v
from kvist.kernels.ops import SPLIT, Attend, Step


def attend(op: Attend, step: Step, compute: torch.dtype) -> None:
    """Execute ``op``: write ``[T, H * Dv]`` into ``op.out``.

    Raises NotResident when a query sees a position whose block is not stored.
    """
    starts = step.starts.tolist()
    for request, (first, last) in enumerate(pairwise(starts)):
        if first == last:
            continue
        result = attend_request(
            op,
            op.q[first:last].view(last - first, op.num_heads, op.store.head_dim),
            step.positions[first:last].long(),
            step.tables[op.store.group][request],
            compute,
        )
        op.out[first:last].view(last - first, op.num_heads, op.store.v_head_dim).copy_(result)


def visible(op: Attend, positions: Tensor, keys: Tensor) -> Tensor:
    """Lanes bool [T, n]: which absolute key positions ``keys`` [n] the queries at ``positions`` [T] see."""
    query, key = positions[:, None], keys[None, :]
    seen = key <= query
    if op.window is not None:
        seen = seen & ((key > query - op.window) | (key < op.sinks))
    return seen


def attend_request(op: Attend, q: Tensor, positions: Tensor, table_row: Tensor, compute: torch.dtype) -> Tensor:
    """Attention of one request: q [T, H, D] at ``positions`` int64 [T] to [T, H, Dv] in the compute type."""
    store, length = op.store, len(positions)
    shape = (store.num_kv_heads, op.num_heads // store.num_kv_heads, length)
    # Query head h = g * (H / G) + r reads kv head g.
    q = q.to(compute).view(length, *shape[:2], store.head_dim).permute(1, 2, 0, 3)
    maximum = torch.full(shape, -torch.inf, dtype=compute)
    total = torch.zeros(shape, dtype=compute)
    out = torch.zeros(*shape, store.v_head_dim, dtype=compute)
    end = int(positions.max()) + 1
    for start in _splits(op, int(positions.min()), end):
        keys = torch.arange(start, min(start + SPLIT, end))
        lanes = visible(op, positions, keys)
        _require_resident(op, table_row, keys[lanes.any(0)])
        k = read_k(store, table_row, start, start + len(keys)).to(compute)
        v = read_v(store, table_row, start, start + len(keys)).to(compute)
        m, s, o = attend_split(q, k, v, lanes, op.softcap, store.dtype == BFLOAT16 and compute == torch.float32)
        seen = lanes.any(1)
        merged = torch.maximum(maximum, m)
        a, b = torch.exp(maximum - merged), torch.exp(m - merged)
        total = torch.where(seen, total * a + s * b, total)
        out = torch.where(seen[:, None], out * a[..., None] + o * b[..., None], out)
        maximum = torch.where(seen, merged, maximum)
    # A query that saw nothing still has total 0: it gives zeros, not 0 / 0.
    out = torch.where(total[..., None] == 0, 0.0, out / total[..., None])
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def attend_split(
    q: Tensor, k: Tensor, v: Tensor, lanes: Tensor, softcap: float | None, round_probabilities: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One split on its own: maximum [G, r, T], sum [G, r, T] and unnormalised output [G, r, T, Dv].

    q [G, r, T, D], k [n, G, D], v [n, G, Dv], lanes bool [T, n]. Rows that see nothing here hold values to be ignored.
    """
    groups, per_group, length, width = q.shape
    scores = (q.reshape(groups, -1, width) @ k.permute(1, 2, 0)).view(groups, per_group, length, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    limit = torch.finfo(scores.dtype).max
    scores = torch.where(lanes, scores.clamp(-limit, limit), -torch.inf)
    m = scores.amax(-1)
    p = torch.where(lanes, torch.exp(scores - m[..., None]), 0.0)
    if round_probabilities:
        p = p.to(torch.bfloat16).to(p.dtype)
    return m, p.sum(-1), _weighted_values(p, v, lanes)


def _weighted_values(p: Tensor, v: Tensor, lanes: Tensor) -> Tensor:
    """Probabilities p [G, r, T, n] times v [n, G, Dv], where a value that a query does not see is never multiplied."""
    groups, per_group, length, n = p.shape
    v = torch.where(lanes.any(0)[:, None, None], v, 0.0).permute(1, 0, 2)
    if bool(torch.isfinite(v).all()):
        return (p.reshape(groups, -1, n) @ v).view(groups, per_group, length, -1)
    # Some query sees an infinity or NaN that others do not: one query at a time.
    rows = [p[:, :, t] @ torch.where(lanes[t][:, None], v, 0.0) for t in range(length)]
    return torch.stack(rows, 2)


def _splits(op: Attend, lowest: int, end: int) -> list[int]:
    """First positions of the splits that queries at lowest..end may see, ascending."""
    oldest = 0 if op.window is None else lowest - op.window + 1
    return [start for start in range(0, end, SPLIT) if start + SPLIT > oldest or start < op.sinks]


def _require_resident(op: Attend, table_row: Tensor, keys: Tensor) -> None:
    """Raise NotResident when a visible position is not stored."""
    missing = blocks_at(table_row, keys, op.store.block_size) < 0
    if bool(missing.any()):
        raise NotResident(
            f"{op.name}: position {int(keys[missing][0])} is visible (window {op.window}, sinks {op.sinks}) but its "
            f"block is not in the table of {table_row.numel()} blocks of {op.store.block_size}: given back too early"
        )
