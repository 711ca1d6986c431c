"""A checkpoint becomes packed weights, each held once: what the decoder's operations name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kvist.base.dtypes import FLOAT32, DType
from kvist.base.errors import OutOfMemory, SpecError
from kvist.base.machine import available_memory
from kvist.kernels.native import NativeBackend
from kvist.kernels.ops import Backend, NormWeight, Weight
from kvist.kernels.packed import PackedWeight
from kvist.kernels.reference_parts import ReferenceWeight
from kvist.model.checkpoint import Checkpoint, loaded_bytes
from kvist.spec.model import (
    Attention,
    FeedForward,
    LatentAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelSpec,
    Norm,
)

# Called with (bytes read so far, bytes in all are unknown) while a model loads.
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """Up from the latents. q_b [H * (nope + R), q_lora_rank]; per head w_uk [C, nope] (transposed) and w_uv [Dv, C].

    ``keys``: each head's w_uk once more as it stands, [nope, C], where latents are to be expanded; else empty.
    """

    q_b: Weight | None
    w_uk: tuple[Weight, ...]
    w_uv: tuple[Weight, ...]
    keys: tuple[Weight, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Router float32 [E, hidden], its bias for choices, and per expert a glu weight [2 * ffn, hidden] and down."""

    router: Weight
    bias: Tensor | None
    gate_up: tuple[Weight, ...]
    down: tuple[Weight, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer's tensors. qkv [(H + G) * D + G * Dv, hidden].

    gate_up is a glu weight [2 * ffn, hidden], or up alone [ffn, hidden] where there is no gate. Of a layer with latent
    attention, qkv is the first projection [q or q_a, kv_a]: all rows that read the stream; q_norm and k_norm are those
    of the latents. Of a layer with experts, gate_up and down are the shared feed forward, or None.
    """

    input_norm: NormWeight | None
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    o: Weight
    o_bias: Tensor | None
    post_attention_norm: NormWeight | None
    pre_ffn_norm: NormWeight | None
    gate_up: Weight | None
    gate_up_bias: Tensor | None
    down: Weight | None
    down_bias: Tensor | None
    post_ffn_norm: NormWeight | None
    latent: LatentWeights | None = None
    experts: ExpertWeights | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """All tensors of a model. ``head`` is the same object as ``embed`` when they are tied."""

    dtype: DType
    embed: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: NormWeight
    head: Weight
    positions: Weight | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices, norms and biases, each object counted once."""
        return sum(_bytes(part) for part in self._held)

    @property
    def packed(self) -> bool:
        """Whether any matrix is held as GGUF packed it."""
        return any(isinstance(part, PackedWeight) for part in self._held)

    @property
    def _held(self) -> list[Any]:
        return list({id(part): part for part in _parts(self)}.values())


def _parts(record: Any) -> Iterator[Any]:
    """Every weight, norm and tensor below ``record``, None left out."""
    for item in record if isinstance(record, tuple) else (getattr(record, field.name) for field in fields(record)):
        if isinstance(item, tuple | LayerWeights | LatentWeights | ExpertWeights):
            yield from _parts(item)
        elif item is not None and not isinstance(item, DType):
            yield item


def _bytes(part: Any) -> int:
    if isinstance(part, NormWeight):
        return _bytes(part.weight) + (0 if part.bias is None else _bytes(part.bias))
    return int(part.numel() * part.element_size() if isinstance(part, Tensor) else part.nbytes)


def inner_width(feed: FeedForward | MixtureOfExperts) -> tuple[int, bool]:
    """(channels, has a gate) of the feed forward that every token takes; 0 where there is none beside experts."""
    return (feed.shared_size, True) if isinstance(feed, MixtureOfExperts) else (feed.intermediate_size, feed.gated)


def require_memory(spec: ModelSpec, dtype: DType, name: str) -> None:
    """Refuse, before anything is read, a model whose weights do not fit: OutOfMemory with both sizes."""
    refuse_beyond(loaded_bytes(spec, dtype.bytes), name, dtype.name, "--dtype bfloat16" if dtype.bytes > 2 else None)


def refuse_beyond(needed: int, name: str, form: str, remedy: str | None = None) -> None:
    """OutOfMemory, with both sizes, when weights of ``needed`` bytes held as ``form`` do not fit what is free."""
    available = available_memory()
    if available is not None and needed > available:
        raise OutOfMemory(
            f"{name}: its weights take {needed / 2**30:.2f} GiB as {form}, and {available / 2**30:.2f} GiB "
            "are free: nothing was loaded; use a smaller model"
            + (f", {remedy}," if remedy else "")
            + " or a machine with more memory"
        )


def load_weights(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    backend: Backend,
    dtype: DType,
    progress: Progress | None = None,
    *,
    packed: bool = False,
    expand: bool = False,
) -> ModelWeights:
    """Read every tensor of ``spec`` into ``backend``'s own form, as ``dtype`` (float32 or bfloat16).

    ``packed``: what GGUF has quantised stays so where the native kernels take its type; the rest becomes ``dtype``.
    Activations are then float32, and the weights' own ``dtype`` says so. ``expand``: with what expanding latents needs.
    ``progress`` is called with the bytes read of every slice. Raises SpecError for a layer kind that cannot run.
    """
    return _Loader(spec, checkpoint, backend, dtype, progress, packed, expand).load()


class _Loader:
    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        backend: Backend,
        dtype: DType,
        progress: Progress | None,
        packed: bool,
        expand: bool,
    ) -> None:
        self.packed, self.expand = packed, expand
        self.spec, self.checkpoint, self.backend, self.dtype = spec, checkpoint, backend, dtype
        self.progress = progress or (lambda nbytes: None)
        self.rows = {name: tensor.shape[0] for name, tensor in checkpoint.expected.items()}

    def load(self) -> ModelWeights:
        spec = self.spec
        embed = self.matrix(spec.vocab_size, spec.hidden_size, ("embed",))
        head = embed if spec.tied_embeddings else self.matrix(spec.vocab_size, spec.hidden_size, ("head",))
        layers = tuple(self.layer(index, layer) for index, layer in enumerate(spec.layers))
        places = spec.learned_positions
        positions = None if places is None else self.matrix(places, spec.hidden_size, ("positions",))
        act = FLOAT32 if self.packed else self.dtype
        return ModelWeights(act, embed, layers, self.norm("final_norm", spec.norm), head, positions)

    def layer(self, index: int, layer: LayerSpec) -> LayerWeights:
        a, feed, at = layer.attention, layer.feed_forward, f"layers.{index}."
        hidden, post = self.spec.hidden_size, layer.post_norms
        input_norm = self.norm(at + "input_norm", layer.norm) if layer.pre_norms else None
        own_norm = layer.pre_norms and not layer.shared_norm
        shared = isinstance(feed, MixtureOfExperts)
        gate_up, gate_up_bias, down, down_bias = self.feed_forward(at + ("shared_" if shared else ""), feed)
        first = self.first_projection(at, a)
        return LayerWeights(
            input_norm=input_norm,
            qkv=self.matrix(sum(self.rows[name] for name in first), hidden, first),
            qkv_bias=self.bias(first),
            q_norm=self.second_norm(at, a, layer.norm, "q"),
            k_norm=self.second_norm(at, a, layer.norm, "k"),
            o=self.matrix(hidden, a.num_heads * a.v_head_dim, (at + "o",)),
            o_bias=self.bias((at + "o",)),
            post_attention_norm=self.norm(at + "post_attention_norm", layer.norm) if post else None,
            pre_ffn_norm=self.norm(at + "pre_ffn_norm", layer.norm) if own_norm else input_norm,
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=down,
            down_bias=down_bias,
            post_ffn_norm=self.norm(at + "post_ffn_norm", layer.norm) if post else None,
            latent=self.latent(at, a) if isinstance(a, LatentAttention) else None,
            experts=self.experts(at, feed) if isinstance(feed, MixtureOfExperts) else None,
        )

    def first_projection(self, at: str, a: Attention | LatentAttention) -> tuple[str, ...]:
        """The tensors that read the stream before attention, one below the other."""
        if isinstance(a, LatentAttention):
            return (at + ("q" if a.q_lora_rank is None else "q_a"), at + "kv_a")
        return (at + "qkv",) if at + "qkv" in self.rows else (at + "q", at + "k", at + "v")

    def second_norm(self, at: str, a: Attention | LatentAttention, norm: Norm, part: str) -> NormWeight | None:
        """The norm of queries or keys behind their projection: per head, or of the latent."""
        if isinstance(a, LatentAttention):
            name = at + ("q_a_norm" if part == "q" else "kv_a_norm")
            return self.norm(name, Norm("rms", a.latent_eps)) if name in self.rows else None
        return self.norm(f"{at}{part}_norm", Norm("rms", norm.eps, norm.offset)) if a.qk_norm else None

    def feed_forward(
        self, at: str, feed: FeedForward | MixtureOfExperts
    ) -> tuple[Weight | None, Tensor | None, Weight | None, Tensor | None]:
        """(gate and up, its bias, down, its bias) of the feed forward whose names begin with ``at``."""
        ffn, gated = inner_width(feed)
        if not ffn:
            return None, None, None, None
        apart = (at + "gate", at + "up") if gated else (at + "up",)
        names = (at + "gate_up",) if at + "gate_up" in self.rows else apart
        gate_up = self.matrix(2 * ffn if gated else ffn, self.spec.hidden_size, names, glu=gated)
        down = self.matrix(self.spec.hidden_size, ffn, (at + "down",))
        return gate_up, self.bias(names), down, self.bias((at + "down",))

    def latent(self, at: str, a: LatentAttention) -> LatentWeights:
        """kv_b cut into the heads' halves, so that latents are never expanded: the key's half transposed."""
        rank, queries = a.kv_lora_rank, a.num_heads * a.qk_head_dim
        whole = ReferenceWeight(a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), rank, FLOAT32)
        for nbytes in self.checkpoint.fill(at + "kv_b", whole, 0):
            self.progress(nbytes)
        heads = whole.data.view(a.num_heads, -1, rank)
        return LatentWeights(
            q_b=None if a.q_lora_rank is None else self.matrix(queries, a.q_lora_rank, (at + "q_b",)),
            w_uk=tuple(self.held(head[: a.qk_nope_head_dim].T.contiguous()) for head in heads),
            w_uv=tuple(self.held(head[a.qk_nope_head_dim :]) for head in heads),
            keys=tuple(self.held(head[: a.qk_nope_head_dim]) for head in heads) if self.expand else (),
        )

    def held(self, values: Tensor) -> Weight:
        """``values`` [n, K] in the backend's form."""
        weight = self.backend.weight(values.shape[0], values.shape[1], self.dtype)
        weight.fill(0, values)
        return weight

    def experts(self, at: str, feed: MixtureOfExperts) -> ExpertWeights:
        hidden, ffn = self.spec.hidden_size, feed.intermediate_size
        router = self.backend.weight(feed.num_experts, hidden, FLOAT32)
        for nbytes in self.checkpoint.fill(at + "router", router, 0):
            self.progress(nbytes)
        names = [f"{at}experts.{expert}." for expert in range(feed.num_experts)]
        return ExpertWeights(
            router=router,
            bias=self.checkpoint.vector(at + "router_bias") if feed.correction_bias else None,
            gate_up=tuple(self.matrix(2 * ffn, hidden, (name + "gate", name + "up"), glu=True) for name in names),
            down=tuple(self.matrix(hidden, ffn, (name + "down",)) for name in names),
        )

    def matrix(self, n: int, k: int, names: tuple[str, ...], glu: bool = False) -> Weight:
        """The tensors ``names`` one below the other."""
        weight = self.packed_matrix(k, names, glu) or self.backend.weight(n, k, self.dtype, glu)
        first = 0
        for name in names:
            for nbytes in self.checkpoint.fill(name, weight, first):
                self.progress(nbytes)
            first += self.rows[name]
        return weight

    def packed_matrix(self, k: int, names: tuple[str, ...], glu: bool) -> Weight | None:
        """An empty weight in the tensors' own types; None unless every one of them can stay packed."""
        if not self.packed or not isinstance(self.backend, NativeBackend):
            return None
        kinds = [self.checkpoint.packing(name) for name in names]
        parts = [(self.rows[name], kind) for name, kind in zip(names, kinds, strict=True) if kind is not None]
        return self.backend.packed(parts, k, glu) if len(parts) == len(names) else None

    def norm(self, name: str, norm: Norm) -> NormWeight:
        if norm.kind not in ("rms", "layer"):
            raise SpecError(f"{name} is a norm of kind {norm.kind!r}: rms and layer are what can run")
        weight = self.checkpoint.vector(name)
        assert weight is not None  # names were checked when the checkpoint was opened
        bias = self.bias((name,)) if norm.bias else None
        return NormWeight((weight + norm.offset).contiguous(), norm.eps, bias, norm.kind == "layer")

    def bias(self, names: tuple[str, ...]) -> Tensor | None:
        """The biases of tensors that stand one below the other; zeros for one of them that has none."""
        parts = [self.checkpoint.vector(f"{name}.bias") for name in names]
        if all(part is None for part in parts):
            return None
        rows = [self.rows[name] for name in names]
        return torch.cat([torch.zeros(n) if p is None else p for n, p in zip(rows, parts, strict=True)]).contiguous()
