"""What a row of the family table holds: the names of an architecture, how its cache is sized, and how it is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvist.spec.rules import CacheRule

# Always so, or what a flag of the config says: (field, value where it is absent).
Flag = bool | tuple[str, bool]


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """Where a family's config says what its experts are.

    ``count``, ``width``, ``shared``: fields of the number of experts, of the width of one, and of how many more run as
    one shared feed forward. ``methods``: values of ``topk_method`` to how a group is scored (None: no groups); the
    first stands where the field is absent. ``correction_bias``: the router has a bias for choices only. ``scale``:
    the field of a factor on all gates.
    """

    count: tuple[str, ...]
    width: tuple[str, ...]
    scoring: str = "softmax"
    methods: Mapping[str, str | None] = field(default_factory=lambda: {"greedy": None})
    normalise: Flag = ("norm_topk_prob", False)
    correction_bias: bool = False
    shared: str | None = None
    scale: str | None = None


@dataclass(frozen=True, slots=True)
class LatentFacts:
    """What multi-head latent attention of a family needs beyond the sizes in its config.

    ``interleaved``: whether the rows of rotated pairs are stored as neighbours.
    """

    interleaved: Flag = True


@dataclass(frozen=True, slots=True)
class DecoderFacts:
    """What running a family needs beyond the sizes in its config.

    ``rope_theta`` and ``local_rope_theta``: bases where the config gives none. ``norm_offset`` holds for HF weights;
    GGUF files of Gemma have the 1 added already. ``gguf_permuted_qk``: q and k rows are interleaved in GGUF files.
    ``gelu_is_tanh``: old configs say ``gelu`` and mean its tanh form. ``multipliers``: how the config scales embedding,
    residual and logits: ``granite`` (each by a field of its own, attention too) or ``depth`` (MiniCPM: the residual by
    scale_depth over the root of the layers, logits by dim_model_base over the hidden size). ``no_rope_step``: every
    step-th layer has no rotation where no list says which. ``attn_softcap`` and ``logit_softcap``: the class's soft
    caps. A family without the first caps no scores, and only one with ``caps_logits`` its logits; a config that says
    otherwise is refused. ``one_norm_unless``: parallel branches share a norm unless this flag is set. ``required``:
    flags that must have this value, else the model is refused. ``only``: fields that may be absent or have one of these
    values. ``absent``: what the class gives to fields that published configs leave out.
    """

    activation: str = "silu"
    gelu_is_tanh: bool = False
    gated: bool = True
    ffn_factor: int | None = None
    norm: str = "rms"
    norm_eps: tuple[str, ...] = ("rms_norm_eps",)
    norm_offset: float = 0.0
    pre_norms: bool = True
    post_norms: bool = False
    parallel: Flag = False
    one_norm_unless: str | None = None
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qkv_bias: Flag = ("attention_bias", False)
    out_bias: Flag = ("attention_bias", False)
    ffn_bias: Flag = False
    scaled_embedding: bool = False
    tied_embeddings: bool = False
    query_scalar: bool = False
    multipliers: str | None = None
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    caps_logits: bool = False
    windows: bool = False
    learned_positions: bool = False
    rope_theta: float = 10_000.0
    local_rope_theta: float | None = None
    rotary_factor: float = 1.0
    no_rope_step: int | None = None
    gguf_permuted_qk: bool = False
    # Trained with queries scaled by hidden / heads instead of head_dim, which its GGUF files do not say:
    # the number of layers tells (llama.cpp decides the same way).
    gguf_scale_by_hidden_at_layers: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    required: Mapping[str, bool] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    experts: ExpertFacts | None = None
    latent: LatentFacts | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture: the names it goes by, the values its class gives to absent fields, and how to run it.

    ``decoder`` is None where the cache can be planned but the model cannot be run.
    """

    name: str
    model_types: tuple[str, ...]
    gguf: tuple[str, ...] = ()
    cache: CacheRule = field(default_factory=CacheRule)
    decoder: DecoderFacts | None = None
    class_defaults: Mapping[str, Any] = field(default_factory=dict)
