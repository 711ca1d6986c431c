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


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al., 2024): each frequency divided by a factor of its own, from one of two lists.

    Trained implementations switch lists when a text outgrows ``original_max_position``, which would change what is
    stored already. Here ``chosen`` (``short`` or ``long``) is fixed once, from the context that the cache is made for:
    see ``spec.rope.fix_context``. None: not fixed yet, and nothing can run. cos and sin are multiplied by
    ``attention_factor``.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    attention_factor: float
    chosen: str | None = None


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al., 2023): fast channel pairs stay, slow ones are divided by ``factor``, a ramp joins the two.

    A pair is fast when it turns more than ``beta_fast`` times within ``original_max_position``, slow when fewer than
    ``beta_slow`` times. ``truncate``: the ramp begins and ends at whole pairs. ``mscale`` and ``mscale_all_dim`` (both
    or none) and ``attention_factor`` are as the checkpoint gives them: ``spec.rope.attention_factor`` says what cos and
    sin are multiplied by, ``spec.rope.score_factor`` what DeepSeek's softmax scale is.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


RopeScaling = LinearScaling | Llama3Scaling | LongRope | Yarn


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
    positions stay visible behind a window. ``qk_norm``: queries and keys are normalised head by head, or, when
    ``qk_norm_whole``, over all heads together.
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
    qk_norm_whole: bool = False


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024): a token leaves c_KV and one rotated k_R, shared by all heads.

    ``scale`` is that of the expanded key, YaRN's factor included. ``q_lora_rank`` None: queries are projected in one
    step. ``bias``: on the projections down to the latents and on the output. ``latent_eps``: of the norms between the
    two steps, which checkpoints do not give. ``interleaved``: the file's rotated rows pair (2j, 2j + 1); loading puts
    them in half-split order.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    rope: Rope | None = None
    bias: bool = False
    latent_eps: float = 1e-6
    interleaved: bool = False

    @property
    def qk_head_dim(self) -> int:
        """Width of a query's head, and of an expanded key's."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) when not ``gated``.

    ``activation`` is ``silu``, ``gelu_tanh`` or ``gelu`` (by erf).
    """

    intermediate_size: int
    activation: str
    bias: bool = False
    gated: bool = True


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """A router chooses ``top_k`` of ``num_experts`` gated feed forwards for each token; a shared one may always run.

    ``intermediate_size`` is one expert's, ``shared_size`` that of the shared feed forward (0: none). Scores are the
    ``scoring`` (``softmax`` over all experts, or ``sigmoid``) of the router's logits; choices go by the score plus a
    bias of the expert's own where ``correction_bias``. With ``groups`` > 1 only the ``top_groups`` best groups can be
    chosen from; a group's score is its ``max``, or the sum of its two best (``top2``). Gates are the unbiased scores,
    divided by their sum when ``normalise``, times ``scale``.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    activation: str
    shared_size: int = 0
    scoring: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    correction_bias: bool = False
    normalise: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Norm:
    """``rms``: x / rms(x) * (offset + w); ``offset`` is 1 where the checkpoint stores w - 1 (Gemma, HF form).

    ``layer``: (x - mean) / std * w + b, the last only with ``bias``.
    """

    kind: str
    eps: float
    offset: float = 0.0
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    ``pre_norms``: each branch reads the normalised stream. ``post_norms``: each branch's output is normalised before it
    joins the residual. ``parallel``: both branches read the stream that entered the layer; with ``shared_norm``, by one
    norm. ``residual_scale``: each branch's output is multiplied by it.
    """

    attention: Attention | LatentAttention
    feed_forward: FeedForward | MixtureOfExperts
    norm: Norm
    post_norms: bool = False
    pre_norms: bool = True
    parallel: bool = False
    shared_norm: bool = False
    residual_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole decoder. ``family`` is the row of the family table it came from; ``dtype`` the checkpoint's own type.

    ``learned_positions``: a vector for each of that many positions is added to the embedding. Logits are multiplied by
    ``logit_scale``, then capped. ``mtp_layers`` layers for multi-token prediction follow in the file and are not read.
    ``fp8_block``: rows and columns that share one factor in matrices stored as float8.
    """

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
    learned_positions: int | None = None
    logit_scale: float = 1.0
    mtp_layers: int = 0
    fp8_block: tuple[int, int] | None = None

    @property
    def num_layers(self) -> int:
        """How many decoder layers."""
        return len(self.layers)
