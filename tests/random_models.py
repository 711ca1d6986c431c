"""Small random models of every attention kind, on real kernels, ready for the laws."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.kernels.native import NativeBackend, variants
from kvist.kernels.ops import Backend, NormWeight
from kvist.model.buffers import first_width
from kvist.model.weights import ExpertWeights, LatentWeights, LayerWeights, ModelWeights, inner_width
from kvist.spec.model import (
    Attention,
    FeedForward,
    LatentAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelSpec,
    Norm,
    Rope,
    RopeScaling,
    Yarn,
)
from kvist.spec.rope import score_factor
from kvist.verify.course import Subject

VOCAB, HIDDEN = 97, 48


@dataclass(frozen=True, slots=True)
class Kind:
    """What distinguishes one small model: heads, widths, and one window (or None) for each layer."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int = 16
    windows: tuple[int | None, ...] = (None, None, None)
    rotary: int | None = None  # None: the whole head
    qk_norm: bool = False
    post_norms: bool = False
    softcap: float | None = None
    sinks: int = 0
    bias: bool = False
    activation: str = "silu"
    whole_qk_norm: bool = False
    pre_norms: bool = True
    gated: bool = True
    norm: str = "rms"
    parallel: bool = False
    shared_norm: bool = False
    learned: bool = False
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)  # of the embedding, the residual, the logits
    latent: tuple[int, int, int, int, int | None] | None = None  # C, nope, R, Dv, rank of the queries' own latent
    scaling: RopeScaling | None = None
    experts: MixtureOfExperts | None = None  # on all layers but the first


YARN = Yarn(factor=4.0, original_max_position=64, mscale=1.3, mscale_all_dim=0.6)
KINDS = {
    "grouped": Kind(),
    "multi-head": Kind(kv_heads=4),
    "multi-query": Kind(kv_heads=1, heads=5),
    "group of three, odd widths": Kind(heads=6, kv_heads=2, head_dim=24, v_head_dim=20),
    "windows": Kind(windows=(40, 40, None, 40), qk_norm=True, post_norms=True, activation="gelu_tanh"),
    "window across splits": Kind(windows=(200, None)),
    "soft cap, biases, partial rotation": Kind(softcap=5.0, bias=True, rotary=8),
    "no rotation": Kind(rotary=0),
    "norms behind, whole heads normalised": Kind(
        qk_norm=True, whole_qk_norm=True, pre_norms=False, post_norms=True, windows=(None, 90)
    ),
    "layer norms, learned positions, no gate": Kind(
        norm="layer", gated=False, rotary=0, learned=True, bias=True, activation="gelu_tanh"
    ),
    "parallel branches": Kind(norm="layer", gated=False, parallel=True, rotary=4, bias=True, activation="gelu"),
    "parallel branches, one norm": Kind(
        norm="layer", gated=False, parallel=True, shared_norm=True, kv_heads=1, activation="gelu"
    ),
    "multipliers": Kind(scales=(3.0, 0.4, 0.3), windows=(None, None)),
    "windows behind sinks": Kind(windows=(40, 140), sinks=5),
    "latents": Kind(latent=(24, 10, 8, 12, None)),
    "latents of queries too, YaRN": Kind(heads=7, latent=(32, 6, 4, 10, 18), scaling=YARN, bias=True),
    "experts in groups": Kind(
        experts=MixtureOfExperts(8, 3, 20, "silu", 24, "softmax", groups=4, top_groups=2, scale=1.5), windows=(None, 90)
    ),
    "latents and experts": Kind(
        heads=16,
        latent=(16, 8, 8, 8, 20),
        scaling=YARN,
        experts=MixtureOfExperts(12, 4, 16, "silu", 20, "sigmoid", 3, 2, "top2", True, True, 2.5),
    ),
}


def latent_of(kind: Kind) -> LatentAttention:
    """The latent attention of all layers of ``kind``."""
    assert kind.latent is not None
    rank, nope, rotary, value, q_rank = kind.latent
    rope = Rope(10000.0, rotary, kind.scaling)
    scale = score_factor(rope) * (nope + rotary) ** -0.5
    return LatentAttention(kind.heads, q_rank, rank, nope, rotary, value, scale, rope, kind.bias)


def spec_of(kind: Kind) -> ModelSpec:
    """The kind as a model's facts."""
    rotary = kind.head_dim if kind.rotary is None else kind.rotary
    norm = Norm(kind.norm, 1e-5, bias=kind.norm == "layer")
    layers = tuple(
        LayerSpec(
            attention=latent_of(kind)
            if kind.latent
            else Attention(
                num_heads=kind.heads,
                num_kv_heads=kind.kv_heads,
                head_dim=kind.head_dim,
                v_head_dim=kind.v_head_dim,
                scale=kind.head_dim**-0.5,
                window=window,
                rope=Rope(10000.0, rotary) if rotary else None,
                qk_norm=kind.qk_norm,
                qk_norm_whole=kind.whole_qk_norm,
                qkv_bias=kind.bias,
                out_bias=kind.bias,
                softcap=kind.softcap,
                sinks=kind.sinks if window else 0,
            ),
            feed_forward=kind.experts
            if kind.experts and index
            else FeedForward(80, kind.activation, kind.bias, kind.gated),
            norm=norm,
            post_norms=kind.post_norms,
            pre_norms=kind.pre_norms,
            parallel=kind.parallel,
            shared_norm=kind.shared_norm,
            residual_scale=kind.scales[1],
        )
        for index, window in enumerate(kind.windows)
    )
    return ModelSpec(
        architecture="random",
        family="random",
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        layers=layers,
        norm=norm,
        max_position=4096,
        tied_embeddings=True,
        dtype="float32",
        embedding_scale=kind.scales[0],
        logit_scale=kind.scales[2],
        learned_positions=512 if kind.learned else None,
    )


@cache
def subject(name: str, dtype: DType = FLOAT32, variant: str | None = None) -> Subject:
    """A random model of kind ``name``; the same weights for every type and variant."""
    return subject_of(KINDS[name], dtype, NativeBackend(variant or variants()[0], 1), name)


def subject_of(kind: Kind, dtype: DType, backend: Backend, name: str = "random") -> Subject:
    """A random model on ``backend``."""
    spec = spec_of(kind)
    draw = torch.Generator().manual_seed(7)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) / shape[-1] ** 0.5

    def matrix(n: int, k: int, glu: bool = False):  # type: ignore[no-untyped-def]
        weight = backend.weight(n, k, dtype, glu)
        weight.fill(0, 2 * values(n, k))
        return weight

    def norm(width: int, kind: str = "rms") -> NormWeight:
        weight = 1 + 0.3 * torch.randn(width, generator=draw)
        if kind == "rms":
            return NormWeight(weight, 1e-5)
        return NormWeight(weight, 1e-5, 0.3 * torch.randn(width, generator=draw), centred=True)

    def latent(a: LatentAttention) -> LatentWeights:
        queries = a.num_heads * a.qk_head_dim
        return LatentWeights(
            q_b=None if a.q_lora_rank is None else matrix(queries, a.q_lora_rank),
            w_uk=tuple(matrix(a.kv_lora_rank, a.qk_nope_head_dim) for _ in range(a.num_heads)),
            w_uv=tuple(matrix(a.v_head_dim, a.kv_lora_rank) for _ in range(a.num_heads)),
        )

    def experts(m: MixtureOfExperts) -> ExpertWeights:
        router = backend.weight(m.num_experts, HIDDEN, FLOAT32)
        router.fill(0, 2 * values(m.num_experts, HIDDEN))
        return ExpertWeights(
            router=router,
            bias=0.3 * torch.randn(m.num_experts, generator=draw) if m.correction_bias else None,
            gate_up=tuple(matrix(2 * m.intermediate_size, HIDDEN, glu=True) for _ in range(m.num_experts)),
            down=tuple(matrix(HIDDEN, m.intermediate_size) for _ in range(m.num_experts)),
        )

    def layer(spec_layer: LayerSpec) -> LayerWeights:
        a, feed = spec_layer.attention, spec_layer.feed_forward
        ffn, gated = inner_width(feed)
        plain = isinstance(a, Attention)
        heads = (a.num_heads, a.num_kv_heads) if plain and kind.whole_qk_norm else (1, 1)
        first = norm(HIDDEN, kind.norm) if kind.pre_norms else None
        second = first if kind.shared_norm or not kind.pre_norms else norm(HIDDEN, kind.norm)
        if isinstance(a, Attention):
            q_norm, k_norm = (norm(n * a.head_dim) if a.qk_norm else None for n in heads)
        else:
            q_norm, k_norm = None if a.q_lora_rank is None else norm(a.q_lora_rank), norm(a.kv_lora_rank)
        qkv, bias = first_width(a), kind.bias and not isinstance(feed, MixtureOfExperts)
        return LayerWeights(
            input_norm=first,
            qkv=matrix(qkv, HIDDEN),
            qkv_bias=values(qkv) if kind.bias else None,
            q_norm=q_norm,
            k_norm=k_norm,
            o=matrix(HIDDEN, a.num_heads * a.v_head_dim),
            o_bias=values(HIDDEN) if kind.bias else None,
            post_attention_norm=norm(HIDDEN) if kind.post_norms else None,
            pre_ffn_norm=second,
            gate_up=matrix(2 * ffn if gated else ffn, HIDDEN, glu=gated),
            gate_up_bias=values(2 * ffn if gated else ffn) if bias else None,
            down=matrix(HIDDEN, ffn),
            down_bias=values(HIDDEN) if bias else None,
            post_ffn_norm=norm(HIDDEN) if kind.post_norms else None,
            latent=latent(a) if isinstance(a, LatentAttention) else None,
            experts=experts(feed) if isinstance(feed, MixtureOfExperts) else None,
        )

    embed = matrix(VOCAB, HIDDEN)
    layers = tuple(layer(x) for x in spec.layers)
    positions = matrix(512, HIDDEN) if kind.learned else None
    weights = ModelWeights(dtype, embed, layers, norm(HIDDEN, kind.norm), embed, positions)

    def threads(count: int | None) -> Backend:
        if isinstance(backend, NativeBackend):
            return type(backend)(backend.variant, count or 1)
        return backend

    return Subject(name, spec, weights, dtype, threads)


def random_tokens(count: int, seed: int = 3) -> list[int]:
    """``count`` token ids."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=draw).tolist()


@dataclass(slots=True)
class Everything:
    """Types and variants for parametrisation."""

    dtypes: tuple[DType, ...] = (FLOAT32, BFLOAT16)
    variants: list[str] = field(default_factory=variants)
