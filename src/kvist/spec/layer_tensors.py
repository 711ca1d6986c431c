"""Which tensors a layer consists of: role, shape, and what is special about its rows, by the layer's facts alone."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.base.errors import SpecError
from kvist.spec.model import Attention, LatentAttention, LayerSpec, MixtureOfExperts, ModelSpec, Norm
from kvist.spec.spellings import Scheme

# Without ".weight" behind their names in files.
BARE = ("router_bias",)
# Held as float32 whatever type the others have: a rounded router chooses other experts.
WIDE = ("router",)


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """One tensor of a layer. ``interleaved`` (blocks, plain rows, rotated rows of a block): see ``names.row_order``."""

    role: str
    shape: tuple[int, ...]
    bias: bool = False
    interleaved: tuple[int, int, int] | None = None


def layer_tensors(spec: ModelSpec, layer: LayerSpec, scheme: Scheme) -> list[LayerTensor]:
    """Every tensor of one layer in order; fused ones where ``scheme`` stores them so. SpecError for other kinds."""
    tensors: list[LayerTensor] = []

    def norm(role: str, width: int, norm: Norm = layer.norm) -> None:
        tensors.append(LayerTensor(role, (width,), norm.bias))

    if layer.pre_norms:
        norm("input_norm", spec.hidden_size)
    match layer.attention:
        case Attention() as attention:
            tensors += _attention(spec, attention, layer.norm, scheme)
        case LatentAttention() as attention:
            tensors += _latent(spec, attention)
        case other:
            raise SpecError(f"{spec.architecture}: layers of kind {type(other).__name__} can be planned, not loaded")
    if layer.post_norms:
        norm("post_attention_norm", spec.hidden_size)
    if layer.pre_norms and not layer.shared_norm:
        norm("pre_ffn_norm", spec.hidden_size)
    tensors += _feed_forward(spec, layer, scheme)
    if layer.post_norms:
        norm("post_ffn_norm", spec.hidden_size)
    return tensors


def _attention(spec: ModelSpec, attention: Attention, norm: Norm, scheme: Scheme) -> list[LayerTensor]:
    hidden, h, g = spec.hidden_size, attention.num_heads, attention.num_kv_heads
    bias = attention.qkv_bias
    rows = (h * attention.head_dim, g * attention.head_dim, g * attention.v_head_dim)
    if scheme.qkv:
        tensors = [LayerTensor("qkv", (sum(rows), hidden), bias)]
    else:
        tensors = [LayerTensor(role, (n, hidden), bias) for role, n in zip(("q", "k", "v"), rows, strict=True)]
    if attention.qk_norm:
        whole = attention.qk_norm_whole
        tensors.append(LayerTensor("q_norm", (rows[0] if whole else attention.head_dim,), norm.bias))
        tensors.append(LayerTensor("k_norm", (rows[1] if whole else attention.head_dim,), norm.bias))
    tensors.append(LayerTensor("o", (hidden, h * attention.v_head_dim), attention.out_bias))
    return tensors


def _latent(spec: ModelSpec, a: LatentAttention) -> list[LayerTensor]:
    """Down to the latents with a bias where the config has one, up from them without."""
    hidden, queries = spec.hidden_size, a.num_heads * a.qk_head_dim
    heads = (a.num_heads, a.qk_nope_head_dim, a.qk_rope_head_dim) if a.interleaved else None
    one = (1, a.kv_lora_rank, a.qk_rope_head_dim) if a.interleaved else None
    if a.q_lora_rank is None:
        tensors = [LayerTensor("q", (queries, hidden), interleaved=heads)]
    else:
        tensors = [
            LayerTensor("q_a", (a.q_lora_rank, hidden), a.bias),
            LayerTensor("q_a_norm", (a.q_lora_rank,)),
            LayerTensor("q_b", (queries, a.q_lora_rank), interleaved=heads),
        ]
    expanded = a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)
    return [
        *tensors,
        LayerTensor("kv_a", (a.kv_lora_rank + a.qk_rope_head_dim, hidden), a.bias, one),
        LayerTensor("kv_a_norm", (a.kv_lora_rank,)),
        LayerTensor("kv_b", (expanded, a.kv_lora_rank)),
        LayerTensor("o", (hidden, a.num_heads * a.v_head_dim), a.bias),
    ]


def _feed_forward(spec: ModelSpec, layer: LayerSpec, scheme: Scheme) -> list[LayerTensor]:
    feed, hidden = layer.feed_forward, spec.hidden_size
    if isinstance(feed, MixtureOfExperts):
        tensors = [LayerTensor("router", (feed.num_experts, hidden))]
        if feed.correction_bias:
            tensors.append(LayerTensor("router_bias", (feed.num_experts,)))
        for expert in range(feed.num_experts):
            tensors += _gated(f"experts.{expert}.", feed.intermediate_size, hidden)
        return [*tensors, *(_gated("shared_", feed.shared_size, hidden) if feed.shared_size else [])]
    width, bias = feed.intermediate_size, feed.bias
    if feed.gated and scheme.gate_up:
        tensors = [LayerTensor("gate_up", (2 * width, hidden), bias)]
    else:
        roles = ("gate", "up") if feed.gated else ("up",)
        tensors = [LayerTensor(role, (width, hidden), bias) for role in roles]
    return [*tensors, LayerTensor("down", (hidden, width), bias)]


def _gated(prefix: str, width: int, hidden: int) -> list[LayerTensor]:
    return [
        LayerTensor(f"{prefix}gate", (width, hidden)),
        LayerTensor(f"{prefix}up", (width, hidden)),
        LayerTensor(f"{prefix}down", (hidden, width)),
    ]
