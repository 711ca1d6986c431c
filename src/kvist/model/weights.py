"""A checkpoint becomes packed weights, each held once: what the decoder's operations name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvist.base.dtypes import FLOAT32, DType
from kvist.base.errors import OutOfMemory, SpecError
from kvist.base.machine import available_memory
from kvist.kernels.native import NativeBackend
from kvist.kernels.ops import Backend, NormWeight, Weight
from kvist.kernels.packed import PackedWeight
from kvist.model.checkpoint import Checkpoint, loaded_bytes
from kvist.spec.model import Attention, LayerSpec, ModelSpec, Norm

# Called with (bytes read so far, bytes in all are unknown) while a model loads.
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer's tensors. qkv [(H + G) * D + G * Dv, hidden].

    gate_up is a glu weight [2 * ffn, hidden], or up alone [ffn, hidden] where there is no gate.
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
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
    post_ffn_norm: NormWeight | None


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
    def _held(self) -> list[Weight | NormWeight | Tensor | None]:
        held: list[Weight | NormWeight | Tensor | None] = [self.embed, self.head, self.positions, self.final_norm]
        for layer in self.layers:
            held += [getattr(layer, field.name) for field in fields(layer)]
        return list({id(part): part for part in held}.values())


def _bytes(part: Weight | NormWeight | Tensor | None) -> int:
    if part is None:
        return 0
    if isinstance(part, NormWeight):
        return _bytes(part.weight) + _bytes(part.bias)
    return part.numel() * part.element_size() if isinstance(part, Tensor) else part.nbytes


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
) -> ModelWeights:
    """Read every tensor of ``spec`` into ``backend``'s own form, as ``dtype`` (float32 or bfloat16).

    ``packed``: what GGUF has quantised stays so where the native kernels take its type; the rest becomes ``dtype``.
    Activations are then float32, and the weights' own ``dtype`` says so.
    ``progress`` is called with the bytes read of every slice. Raises SpecError for a layer kind that cannot run.
    """
    return _Loader(spec, checkpoint, backend, dtype, progress, packed).load()


class _Loader:
    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        backend: Backend,
        dtype: DType,
        progress: Progress | None,
        packed: bool,
    ) -> None:
        self.packed = packed
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
        a, at = layer.attention, f"layers.{index}."
        if not isinstance(a, Attention):
            raise SpecError(f"layer {index} is of kind {type(a).__name__}, which can be planned but not run")
        hidden, ffn, post = self.spec.hidden_size, layer.feed_forward.intermediate_size, layer.post_norms
        qk_norm = Norm("rms", layer.norm.eps, layer.norm.offset)
        gated, parts = layer.feed_forward.gated, (at + "q", at + "k", at + "v")
        qkv_names = (at + "qkv",) if at + "qkv" in self.rows else parts
        fused = at + "gate_up" in self.rows
        up_names = (at + "gate_up",) if fused else (at + "gate", at + "up") if gated else (at + "up",)
        input_norm = self.norm(at + "input_norm", layer.norm) if layer.pre_norms else None
        own_norm = layer.pre_norms and not layer.shared_norm
        qkv_rows = (a.num_heads + a.num_kv_heads) * a.head_dim + a.num_kv_heads * a.v_head_dim
        return LayerWeights(
            input_norm=input_norm,
            qkv=self.matrix(qkv_rows, hidden, qkv_names),
            qkv_bias=self.bias(qkv_names),
            q_norm=self.norm(at + "q_norm", qk_norm) if a.qk_norm else None,
            k_norm=self.norm(at + "k_norm", qk_norm) if a.qk_norm else None,
            o=self.matrix(hidden, a.num_heads * a.v_head_dim, (at + "o",)),
            o_bias=self.bias((at + "o",)),
            post_attention_norm=self.norm(at + "post_attention_norm", layer.norm) if post else None,
            pre_ffn_norm=self.norm(at + "pre_ffn_norm", layer.norm) if own_norm else input_norm,
            gate_up=self.matrix(2 * ffn if gated else ffn, hidden, up_names, glu=gated),
            gate_up_bias=self.bias(up_names),
            down=self.matrix(hidden, ffn, (at + "down",)),
            down_bias=self.bias((at + "down",)),
            post_ffn_norm=self.norm(at + "post_ffn_norm", layer.norm) if post else None,
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
        parts = [part for part in (self.checkpoint.vector(f"{name}.bias") for name in names) if part is not None]
        return torch.cat(parts).contiguous() if parts else None
