"""ModelSpec and LayerSpec: the frozen facts of a model. A variant is a value here, never a class of its own."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's frequency-dependent scaling (Meta, 2024): long wavelengths divided by ``factor``."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


RopeScaling = LinearScaling | Llama3Scaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of the first ``rotary_dim`` channels of a head (Su et al., 2021), half-split pairs."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    # Frequency divisors stored in the file (GGUF ``rope_freqs.weight``), one per pair; they replace ``scaling``.
    divisors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention whose tokens leave one key and one value per kv head.

    ``window`` is the number of visible keys, the current one included; None sees everything. The first ``sinks``
    positions stay visible behind a window.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None = None
    rope: Rope | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    softcap: float | None = None
    sinks: int = 0


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024): a token leaves c_KV and one rotated k_R, shared by all heads."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    rope: Rope | None = None


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(act(gate(x)) * up(x)). ``activation`` is ``silu`` or ``gelu_tanh``."""

    intermediate_size: int
    activation: str
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Norm:
    """``rms``: x / rms(x) * (offset + w); ``offset`` is 1 where the checkpoint stores w - 1 (Gemma, HF form)."""

    kind: str
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer. ``post_norms``: each branch's output is normalised before it joins the residual (Gemma)."""

    attention: Attention | LatentAttention
    feed_forward: FeedForward
    norm: Norm
    post_norms: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole decoder. ``family`` is the row of the family table it came from; ``dtype`` the checkpoint's own type."""

    architecture: str
    family: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    norm: Norm
    max_position: int
    tied_embeddings: bool
    dtype: str
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def num_layers(self) -> int:
        """How many decoder layers."""
        return len(self.layers)
