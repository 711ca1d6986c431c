"""Multi-head latent attention in small reference functions: compress, expand, absorb.

A token is compressed to one latent c_KV shared by all heads; keys and values are expanded from it, or, in the absorbed
form, never are: q . (W_UK c) = (W_UK^T q) . c, and sum_j p_j (W_UV c_j) = W_UV (sum_j p_j c_j). The softmax scale is
the same in both forms: that of the expanded key, 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim), not of the latent.

Axes: T tokens, H heads, D width of an expanded key (without its rope part), Dv of a value, C = kv_lora_rank, R the rope
part. Every sum is one chain in index order in the inputs' own type, so a result never depends on T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.base.errors import KernelError


def compress(x: Tensor, w_dkv: Tensor) -> Tensor:
    """c_KV ``[T, C]`` of hidden states x ``[T, hidden]`` with w_dkv ``[C, hidden]``."""
    return _product(x, w_dkv)


def expand(c_kv: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys ``[T, H, D]`` and values ``[T, H, Dv]`` of ``[T, C]``, with w_uk ``[H, D, C]`` and w_uv ``[H, Dv, C]``."""
    k = _product(c_kv, w_uk.flatten(0, 1)).view(-1, *w_uk.shape[:2])
    v = _product(c_kv, w_uv.flatten(0, 1)).view(-1, *w_uv.shape[:2])
    return k, v


def absorb(q: Tensor, w_uk: Tensor) -> Tensor:
    """Queries that meet the latent itself: ``[T, H, C]`` of q ``[T, H, D]`` with w_uk ``[H, D, C]``."""
    return _per_head(q, w_uk.transpose(1, 2))


def expand_output(o: Tensor, w_uv: Tensor) -> Tensor:
    """Outputs ``[T, H, Dv]`` of weighted latents o ``[T, H, C]`` with w_uv ``[H, Dv, C]``."""
    return _per_head(o, w_uv)


def attend_absorbed(
    q: Tensor, q_rope: Tensor, c_kv: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor, scale: float
) -> Tensor:
    """Attention of one query over n stored latents without expanding them: ``[H, Dv]``.

    q ``[H, D]``, q_rope ``[H, R]`` (rotated), c_kv ``[n, C]``, k_rope ``[n, R]`` (rotated, one for all heads).
    """
    latent_q = torch.cat([absorb(q[None], w_uk)[0], q_rope], 1)
    scores = _product(latent_q, torch.cat([c_kv, k_rope], 1)) * scale
    weighted = _product(torch.softmax(scores, 1), c_kv.T)
    return expand_output(weighted[None], w_uv)[0]


def _per_head(x: Tensor, w: Tensor) -> Tensor:
    """``[T, H, N]`` of x ``[T, H, K]`` with one matrix for each head, w ``[H, N, K]``."""
    if x.dim() != 3 or x.shape[1:] != (w.shape[0], w.shape[2]):
        raise KernelError(f"{list(x.shape)} does not fit {w.shape[0]} heads of matrices {list(w.shape[1:])}")
    return torch.stack([_product(x[:, head], w[head]) for head in range(w.shape[0])], 1)


def _product(x: Tensor, w: Tensor) -> Tensor:
    """``[T, N]`` of x ``[T, K]`` with w ``[N, K]``, each element one chain of additions in index order."""
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise KernelError(f"rows {list(x.shape)} do not fit a matrix {list(w.shape)}: their widths must be equal")
    total = torch.zeros(x.shape[0], w.shape[0], dtype=x.dtype)
    for k in range(x.shape[1]):
        total = total + x[:, k, None] * w[:, k]
    return total
