"""The working memory of a step, allocated once: as wide as the widest layer needs it."""

from __future__ import annotations

import torch

from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.kernels.ops import torch_dtype
from kvist.spec.model import Attention, LatentAttention, MixtureOfExperts, ModelSpec


class Buffers:
    """The residual stream, one branch, projections, logits. Rows are tokens; what no layer needs has no columns.

    Latent attention: ``queries`` of all heads where they have a latent of their own, ``absorbed`` ones that meet the
    cached latents, ``values`` of all heads. Experts: ``scores`` of all, ``ids`` and ``gates`` of the chosen, and what
    each of these makes of the token (``chosen_gated``, ``chosen_out``).
    """

    def __init__(self, spec: ModelSpec, dtype: DType, kv_dtype: DType, tokens: int, rows: int) -> None:
        """Allocate for at most ``tokens`` tokens and ``rows`` rows of logits a step."""
        attentions = [layer.attention for layer in spec.layers]
        latents = [a for a in attentions if isinstance(a, LatentAttention)]
        mixtures = [x.feed_forward for x in spec.layers if isinstance(x.feed_forward, MixtureOfExperts)]
        dense = [
            x.shared_size if isinstance(x, MixtureOfExperts) else x.intermediate_size
            for x in (layer.feed_forward for layer in spec.layers)
        ]
        hidden, act = spec.hidden_size, torch_dtype(dtype)
        q_type = torch_dtype(BFLOAT16 if kv_dtype == BFLOAT16 else FLOAT32)
        self.x = torch.empty(tokens, hidden)
        self.branch = torch.empty(tokens, hidden if any(layer.post_norms for layer in spec.layers) else 0)
        self.qkv = torch.empty(tokens, max(first_width(a) for a in attentions))
        widths = [a.num_heads * key_width(a) for a in attentions] + [a.num_heads * a.qk_head_dim for a in latents]
        self.q = torch.empty(tokens, max(widths), dtype=q_type)
        self.attended = torch.empty(tokens, max(a.num_heads * value_width(a) for a in attentions), dtype=act)
        up = [a.num_heads * a.qk_head_dim for a in latents if a.q_lora_rank is not None]
        self.queries = torch.empty(tokens, max(up, default=0))
        self.absorbed = torch.empty(tokens, max((a.num_heads * a.kv_lora_rank for a in latents), default=0))
        self.values = torch.empty(tokens, max((a.num_heads * a.v_head_dim for a in latents), default=0))
        self.gated = torch.empty(tokens, max(dense), dtype=act)
        top_k = max((m.top_k for m in mixtures), default=0)
        self.scores = torch.empty(tokens, max((m.num_experts for m in mixtures), default=0))
        self.ids = torch.empty(tokens, top_k, dtype=torch.int32)
        self.gates = torch.empty(tokens, top_k)
        width = max((m.top_k * m.intermediate_size for m in mixtures), default=0)
        self.chosen_gated = torch.empty(tokens, width, dtype=act)
        self.chosen_out = torch.empty(tokens, top_k * hidden)
        self.logits = torch.empty(rows, spec.vocab_size)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.numel() * t.element_size() for t in vars(self).values())


def first_width(attention: Attention | LatentAttention) -> int:
    """Rows of the projections that read the stream."""
    if isinstance(attention, LatentAttention):
        queries = attention.q_lora_rank or attention.num_heads * attention.qk_head_dim
        return queries + attention.kv_lora_rank + attention.qk_rope_head_dim
    keys = (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    return keys + attention.num_kv_heads * attention.v_head_dim


def key_width(attention: Attention | LatentAttention) -> int:
    """Channels of what a query meets in the cache."""
    if isinstance(attention, LatentAttention):
        return attention.kv_lora_rank + attention.qk_rope_head_dim
    return attention.head_dim


def value_width(attention: Attention | LatentAttention) -> int:
    """Channels that attention mixes for each head."""
    return attention.kv_lora_rank if isinstance(attention, LatentAttention) else attention.v_head_dim
