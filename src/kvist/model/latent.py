"""Multi-head latent attention as operations: queries absorb W_UK, the cached latent is key and value, W_UV comes last.

One form for prefill and decode: q . (W_UK c) = (W_UK^T q) . c for every query, so a cached latent is never expanded,
and how tokens are cut into steps changes nothing. Who asks for it gets a second form for long steps, which expands
every latent for every head: fewer operations there, and answers that depend on how tokens were cut.
"""

from __future__ import annotations

from torch import Tensor

from kvist.base.dtypes import DType
from kvist.kernels.ops import AppendLatent, Attend, AttendExpanded, GroupedLinear, LayerStore, Linear, Op
from kvist.model.buffers import Buffers, first_width, key_width
from kvist.model.weights import LatentWeights, LayerWeights
from kvist.spec.model import LatentAttention, ModelSpec


def attend_latents(
    at: str,
    a: LatentAttention,
    w: LayerWeights,
    latent: LatentWeights,
    b: Buffers,
    store: LayerStore,
    cos: Tensor | None,
    sin: Tensor | None,
    expand: bool = False,
) -> tuple[list[Op], list[Op], Tensor]:
    """(projections of the stream, what follows them, values float32 [T, H * Dv]) of one layer, names begin with ``at``.

    ``cos`` and ``sin`` float32 [positions, R/2]. ``expand``: by keys and values of every head.
    """
    heads, rank = a.num_heads, a.kv_lora_rank
    down = b.qkv[:, : first_width(a)]
    kv = down[:, -key_width(a) :]
    queries = down[:, : -key_width(a)]
    ops: list[Op] = []
    if latent.q_b is not None:
        narrow, queries = queries, b.queries[:, : heads * a.qk_head_dim]
        ops.append(Linear(at + "queries", narrow, latent.q_b, queries, norm=w.q_norm))
    absorbed, values = b.absorbed[:, : heads * rank], b.values[:, : heads * a.v_head_dim]
    q = b.q[:, : heads * (a.qk_head_dim if expand else key_width(a))]
    kept = None if expand else absorbed
    append = AppendLatent(at + "append", queries, kept, kv, q, store, heads, a.scale, cos, sin, w.k_norm)
    if expand:
        ops += [append, AttendExpanded(at + "attend", q, values, store, heads, latent.keys, latent.w_uv)]
    else:
        attended = b.attended[:, : heads * rank]
        ops += [
            GroupedLinear(at + "absorb", queries, latent.w_uk, absorbed, heads, source_stride=a.qk_head_dim),
            append,
            Attend(at + "attend", q, attended, store, heads),
            GroupedLinear(at + "values", attended, latent.w_uv, values, heads, source_stride=rank),
        ]
    first: list[Op] = [Linear(at + "latents", b.x, w.qkv, down, norm=w.input_norm, bias=w.qkv_bias)]
    return first, ops, values


def expand_from(a: LatentAttention) -> int:
    """Queries of one request from which expanding its latents takes fewer multiplications than absorbing: 171 for V3.

    Expanding one latent for one head takes C (nope + Dv) of them; each query that meets it then saves the difference of
    (C + R) + C and (nope + R) + Dv.
    """
    saved = (key_width(a) + a.kv_lora_rank) - (a.qk_head_dim + a.v_head_dim)
    if saved <= 0:
        return 2**31
    return -(-a.kv_lora_rank * (a.qk_nope_head_dim + a.v_head_dim) // saved)


def key_bytes(spec: ModelSpec, dtype: DType) -> int:
    """Bytes of every W_UK held once more, in ``dtype``: what expanding needs beside the weights."""
    latents = [layer.attention for layer in spec.layers if isinstance(layer.attention, LatentAttention)]
    return sum(a.num_heads * a.qk_nope_head_dim * a.kv_lora_rank for a in latents) * dtype.bytes
