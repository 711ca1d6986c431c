"""One row of data per architecture. Rules read fields of the config, never a model's name or id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvist.spec.family_rows import ROWS
from kvist.spec.rules import CacheRule, Periodic


@dataclass(frozen=True, slots=True)
class DecoderFacts:
    """What running a family needs beyond the sizes in its config.

    ``pattern``: every pattern-th layer sees everything, the others a window (None: the config says which).
    ``rope_theta`` and ``local_rope_theta``: bases where the config gives none. ``norm_offset`` holds for HF weights;
    GGUF files of Gemma have the 1 added already. ``gguf_permuted_qk``: q and k rows are interleaved in GGUF files.
    """

    activation: str = "silu"
    norm_offset: float = 0.0
    post_norms: bool = False
    qk_norm: bool = False
    scaled_embedding: bool = False
    tied_embeddings: bool = False
    query_scalar: bool = False
    pattern: int | None = None
    rope_theta: float = 10_000.0
    local_rope_theta: float | None = None
    gguf_permuted_qk: bool = False
    # Trained with queries scaled by hidden / heads instead of head_dim, which its GGUF files do not say:
    # the number of layers tells (llama.cpp decides the same way).
    gguf_scale_by_hidden_at_layers: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None


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


_RUNNABLE: tuple[Family, ...] = (
    Family(
        name="llama",
        model_types=("llama",),
        gguf=("llama",),
        decoder=DecoderFacts(gguf_permuted_qk=True, bos_token_id=1, eos_token_id=2),
        class_defaults={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
        },
    ),
    Family(
        name="gemma3",
        model_types=("gemma3_text", "gemma3"),
        gguf=("gemma3",),
        cache=CacheRule(Periodic(6), head_dim_given=True, window_given=True),
        decoder=DecoderFacts(
            activation="gelu_tanh",
            norm_offset=1.0,
            post_norms=True,
            qk_norm=True,
            scaled_embedding=True,
            tied_embeddings=True,
            query_scalar=True,
            pattern=6,
            rope_theta=1_000_000.0,
            local_rope_theta=10_000.0,
            gguf_scale_by_hidden_at_layers=62,
            bos_token_id=2,
            eos_token_id=1,
        ),
        class_defaults={
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
    ),
)

FAMILIES: tuple[Family, ...] = (
    *_RUNNABLE,
    *(Family(name, model_types, gguf, rule) for name, model_types, gguf, rule in ROWS),
)
BY_MODEL_TYPE: Mapping[str, Family] = {name: family for family in FAMILIES for name in family.model_types}
BY_GGUF: Mapping[str, Family] = {name: family for family in FAMILIES for name in family.gguf}


def family_of(model_type: str | None) -> Family | None:
    """The row of ``model_type``, or None."""
    return None if model_type is None else BY_MODEL_TYPE.get(model_type)


def runnable_names() -> str:
    """The families that can be run, for messages."""
    return ", ".join(family.name for family in FAMILIES if family.decoder is not None)


def planned_names() -> str:
    """The families whose cache can be planned, for messages."""
    return ", ".join(family.name for family in FAMILIES)
