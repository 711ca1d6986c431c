"""Multi-head latent attention judged from outside: every latent is expanded to keys and values of all heads.

The engine never does that; it has the softmax scale from the config's reader, and here it is worked out again.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvist.spec.model import LatentAttention, Norm, Yarn
from kvist.verify.judge_parts import Weights, normalise, rotation_angles, stretch, temperature, turn


def latent_attention(a: LatentAttention, weights: Weights, x: Tensor) -> Tensor:
    """The attention branch of x float64 [T, hidden], normalised already: [T, hidden]."""
    length, norm = len(x), Norm("rms", a.latent_eps)

    def project(role: str, y: Tensor, bias: bool = False) -> Tensor:
        y = y @ weights(role).T
        return y + weights(f"{role}.bias") if bias else y

    if a.q_lora_rank is None:
        q = project("q", x)
    else:
        q = project("q_b", normalise(project("q_a", x, a.bias), weights, "q_a_norm", norm))
    q = q.view(length, a.num_heads, a.qk_head_dim)
    down = project("kv_a", x, a.bias)
    latent, k_rope = down[:, : a.kv_lora_rank], down[:, None, a.kv_lora_rank :]
    expanded = project("kv_b", normalise(latent, weights, "kv_a_norm", norm)).view(length, a.num_heads, -1)
    k, v = expanded[..., : a.qk_nope_head_dim], expanded[..., a.qk_nope_head_dim :]
    q, q_rope = q[..., : a.qk_nope_head_dim], q[..., a.qk_nope_head_dim :]
    if a.rope is not None:
        angles, longer = rotation_angles(a.rope, length), stretch(a.rope)
        q_rope, k_rope = turn(q_rope, angles, longer), turn(k_rope, angles, longer)
    scores = torch.einsum("thd,jhd->htj", q, k) + torch.einsum("thd,jd->htj", q_rope, k_rope[:, 0])
    future = torch.ones(length, length).triu(1) > 0
    weighted = torch.softmax((scores * _scale(a)).masked_fill(future, -math.inf), -1)
    return project("o", torch.einsum("htj,jhd->thd", weighted, v).reshape(length, -1), a.bias)


def _scale(a: LatentAttention) -> float:
    """That of an expanded key, times the square of YaRN's temperature by ``mscale_all_dim``."""
    scale = 1 / math.sqrt(a.qk_nope_head_dim + a.qk_rope_head_dim)
    scaling = a.rope.scaling if a.rope is not None else None
    if isinstance(scaling, Yarn) and scaling.mscale_all_dim is not None:
        scale *= temperature(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale
