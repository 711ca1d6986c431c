"""Multi-head latent attention as operations: queries absorb W_UK, the cached latent is key and value, W_UV comes last.

One form for prefill and decode: q . (W_UK c) = (W_UK^T q) . c for every query, so a cached latent is never expanded,
and how tokens are cut into steps changes nothing.
"""

from __future__ import annotations

from torch import Tensor

from kvist.kernels.ops import AppendLatent, Attend, GroupedLinear, LayerStore, Linear, Op
from kvist.model.buffers import Buffers, first_width, key_width
from kvist.model.weights import LatentWeights, LayerWeights
from kvist.spec.model import LatentAttention


def attend_latents(
    at: str,
    a: LatentAttention,
    w: LayerWeights,
    latent: LatentWeights,
    b: Buffers,
    store: LayerStore,
    cos: Tensor | None,
    sin: Tensor | None,
) -> tuple[list[Op], list[Op], Tensor]:
    """(projections of the stream, what follows them, values float32 [T, H * Dv]) of one layer, names begin with ``at``.

    ``cos`` and ``sin`` float32 [positions, R/2].
    """
    heads, rank = a.num_heads, a.kv_lora_rank
    down = b.qkv[:, : first_width(a)]
    kv = down[:, -key_width(a) :]
    queries = down[:, : -key_width(a)]
    ops: list[Op] = []
    if latent.q_b is not None:
        narrow, queries = queries, b.queries[:, : heads * a.qk_head_dim]
        ops.append(Linear(at + "queries", narrow, latent.q_b, queries, norm=w.q_norm))
    absorbed, q = b.absorbed[:, : heads * rank], b.q[:, : heads * key_width(a)]
    attended, values = b.attended[:, : heads * rank], b.values[:, : heads * a.v_head_dim]
    ops += [
        GroupedLinear(at + "absorb", queries, latent.w_uk, absorbed, heads, source_stride=a.qk_head_dim),
        AppendLatent(at + "append", queries, absorbed, kv, q, store, heads, a.scale, cos, sin, w.k_norm),
        Attend(at + "attend", q, attended, store, heads),
        GroupedLinear(at + "values", attended, latent.w_uv, values, heads, source_stride=rank),
    ]
    first: list[Op] = [Linear(at + "latents", b.x, w.qkv, down, norm=w.input_norm, bias=w.qkv_bias)]
    return first, ops, values
