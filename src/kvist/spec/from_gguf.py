"""GGUF metadata to ModelSpec, fail-closed."""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvist.base.errors import BadValue, UnknownArchitecture
from kvist.spec.config_layers import check_groups, softcap
from kvist.spec.config_rope import long_stretch
from kvist.spec.families import BY_GGUF, DecoderFacts, Family, runnable_names
from kvist.spec.gguf_file import GgufFile
from kvist.spec.gguf_split import read_model_file
from kvist.spec.model import (
    Attention,
    FeedForward,
    LayerSpec,
    LinearScaling,
    LongRope,
    ModelSpec,
    Norm,
    Rope,
    RopeScaling,
)
from kvist.spec.read import Fields
from kvist.spec.rules import Periodic

# Fields that would change the arithmetic of a decoder whose family does not use them.
_UNSUPPORTED = ("expert_count", "attention.max_alibi_bias", "attention.clamp_kqv")
_MULTIPLIERS = ("embedding_scale", "residual_scale", "logit_scale")
_EPS = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A GGUF file and the model it describes. ``permuted_qk``: q and k rows are interleaved (names.half_split_rows)."""

    file: GgufFile
    spec: ModelSpec
    permuted_qk: bool


def gguf_model(source: GgufFile | str | Path) -> GgufModel:
    """Header and runnable spec of the GGUF file ``source``. Errors as in ``read_gguf`` and ``model_spec``."""
    file = source if isinstance(source, GgufFile) else read_model_file(source)
    architecture = file.metadata.get("general.architecture")
    family = BY_GGUF.get(architecture) if isinstance(architecture, str) else None
    if family is None or family.decoder is None:
        state = "unknown" if family is None else "not runnable yet:"
        raise UnknownArchitecture(f"{file.path}: {state} architecture {architecture!r}; runnable: {runnable_names()}")
    prefix = f"{architecture}."
    data = {key[len(prefix) :]: value for key, value in file.metadata.items() if key.startswith(prefix)}
    spec = _spec(family, family.decoder, Fields(data, f"{file.path}: {architecture}"), file)
    return GgufModel(file, spec, family.decoder.gguf_permuted_qk)


def _spec(family: Family, facts: DecoderFacts, fields: Fields, file: GgufFile) -> ModelSpec:
    other_eps = (name for kind, name in _EPS.items() if kind != facts.norm)
    for name in (*_UNSUPPORTED, *other_eps, *(() if facts.multipliers else _MULTIPLIERS)):
        if fields.data.get(name):
            raise BadValue(f"{fields.where}: {name} = {fields.data[name]} is not supported by family {family.name}")
    num_layers = fields.integer("block_count", high=10_000)
    hidden = fields.integer("embedding_length", high=2**20)
    # Gemma's GGUF norms have their 1 added already, so the offset is 0 in every family.
    norm = Norm(facts.norm, fields.number(_EPS[facts.norm], high=1.0), bias=facts.norm == "layer")
    widths = _per_layer(fields, "feed_forward_length", num_layers, 2**24)
    attentions = _attentions(family, facts, fields, file, num_layers, hidden)
    has_ffn_bias = "blk.0.ffn_up.bias" in file.tensors
    parallel = _parallel(facts, fields)
    one_norm = parallel and facts.one_norm_unless is not None and "blk.0.attn_norm_2.weight" not in file.tensors
    multipliers = [_multiplier(facts, fields, name) for name in _MULTIPLIERS]
    layers = tuple(
        LayerSpec(
            attention=attention,
            feed_forward=FeedForward(width, facts.activation, has_ffn_bias, facts.gated),
            norm=norm,
            post_norms=facts.post_norms,
            pre_norms=facts.pre_norms,
            parallel=parallel,
            shared_norm=one_norm,
            residual_scale=multipliers[1],
        )
        for attention, width in zip(attentions, widths, strict=True)
    )
    max_position = fields.integer("context_length", high=2**31)
    special = Fields(_tail(file.metadata, "tokenizer.ggml."), f"{file.path}: tokenizer.ggml")
    stops = [special.maybe_integer(key, low=0) for key in _STOP_KEYS]
    return ModelSpec(
        architecture=str(file.metadata["general.architecture"]),
        family=family.name,
        hidden_size=hidden,
        vocab_size=_vocab_size(fields, file),
        layers=layers,
        norm=norm,
        max_position=max_position,
        tied_embeddings="output.weight" not in file.tensors,
        dtype=main_type(file),
        embedding_scale=math.sqrt(hidden) if facts.scaled_embedding else multipliers[0],
        logit_scale=1.0 / multipliers[2],
        logit_softcap=softcap(family, fields, "final_logit_softcapping", facts.logit_softcap, facts.caps_logits),
        learned_positions=max_position if facts.learned_positions else None,
        bos_token_id=special.maybe_integer("bos_token_id", low=0),
        eos_token_ids=tuple(dict.fromkeys(stop for stop in stops if stop is not None)),
    )


def _parallel(facts: DecoderFacts, fields: Fields) -> bool:
    if isinstance(facts.parallel, bool) or facts.one_norm_unless is not None:
        return bool(facts.parallel)
    return fields.flag(*facts.parallel[:1], default=facts.parallel[1])


def _multiplier(facts: DecoderFacts, fields: Fields, name: str) -> float:
    found = fields.maybe_number(name, high=1e6) if facts.multipliers else None
    return 1.0 if found is None else found


def _tail(metadata: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}


def _vocab_size(fields: Fields, file: GgufFile) -> int:
    """Rows of the embedding; ``vocab_size`` and the token list must not contradict them."""
    embedding = file.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding else None
    stated = fields.maybe_integer("vocab_size", high=2**24) or file.count("tokenizer.ggml.tokens")
    if rows is None and stated is None:
        raise fields.missing("vocab_size")
    if rows is not None and stated is not None and stated > rows:
        raise BadValue(f"{fields.where}: {stated} tokens, but token_embd.weight has {rows} rows")
    return rows or stated or 0


def main_type(file: GgufFile) -> str:
    """The element type that holds most bytes of a file, under its usual name where it is a plain one."""
    held: Counter[str] = Counter()
    for tensor in file.tensors.values():
        held[tensor.kind.name] += tensor.nbytes
    name = held.most_common(1)[0][0] if held else "f32"
    return {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(name, name)


def _per_layer(fields: Fields, name: str, num_layers: int, high: int) -> list[int]:
    """A field that is one number for all layers or a list with one for each."""
    found = fields.raw(name)
    if found is None:
        raise fields.missing(name)
    if isinstance(found[1], list):
        items = fields.maybe_list(name, length=num_layers) or []
        return [fields.as_integer(f"{name}[{i}]", item, 1, high) for i, item in enumerate(items)]
    return [fields.integer(name, high=high)] * num_layers


def _attentions(
    family: Family, facts: DecoderFacts, fields: Fields, file: GgufFile, num_layers: int, hidden: int
) -> list[Attention]:
    heads = _per_layer(fields, "attention.head_count", num_layers, 2**16)
    kv_heads = (
        heads
        if fields.raw("attention.head_count_kv") is None
        else _per_layer(fields, "attention.head_count_kv", num_layers, 2**16)
    )
    windows = _windows(family, fields, num_layers)
    factors = _Factors(*(_divisors(file, f"rope_{name}.weight") for name in ("freqs", "factors_short", "factors_long")))
    result = []
    for index, (num_heads, num_kv_heads, window) in enumerate(zip(heads, kv_heads, windows, strict=True)):
        check_groups(fields.where, num_heads, num_kv_heads)
        head_dim = fields.maybe_integer("attention.key_length", high=2**14)
        if head_dim is None:
            if hidden % num_heads:
                raise BadValue(f"{fields.where}: embedding_length {hidden} is not a multiple of head_count {num_heads}")
            head_dim = hidden // num_heads
        scale = fields.maybe_number("attention.scale")
        if scale is None:
            by_hidden = num_layers == facts.gguf_scale_by_hidden_at_layers
            scale = 1.0 / math.sqrt(hidden / num_heads if by_hidden else head_dim)
        result.append(
            Attention(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                v_head_dim=fields.maybe_integer("attention.value_length", high=2**14) or head_dim,
                scale=scale,
                window=window,
                rope=_rope(facts, fields, head_dim, window, factors) if _rotates(facts, index) else None,
                qk_norm=facts.qk_norm,
                qk_norm_whole=facts.qk_norm_whole,
                qkv_bias=f"blk.{index}.attn_q.bias" in file.tensors or f"blk.{index}.attn_qkv.bias" in file.tensors,
                out_bias=f"blk.{index}.attn_output.bias" in file.tensors,
                softcap=softcap(
                    family, fields, "attn_logit_softcapping", facts.attn_softcap, facts.attn_softcap is not None
                ),
            )
        )
    return result


@dataclass(frozen=True, slots=True)
class _Factors:
    """Frequency divisors that a file stores as tensors: one list, or LongRoPE's two."""

    plain: tuple[float, ...] | None
    short: tuple[float, ...] | None
    long: tuple[float, ...] | None


def _rotates(facts: DecoderFacts, index: int) -> bool:
    """Whether layer ``index`` rotates. GGUF files do not list the layers that do not: llama.cpp uses the same step."""
    return not facts.learned_positions and (facts.no_rope_step is None or (index + 1) % facts.no_rope_step != 0)


def _windows(family: Family, fields: Fields, num_layers: int) -> list[int | None]:
    """The window of each layer; ``sliding_window_pattern`` is a period or a list of flags (true: windowed)."""
    pattern = family.cache.pattern
    if not isinstance(pattern, Periodic):
        return [fields.maybe_integer("attention.sliding_window", low=0) or None] * num_layers
    window = fields.integer("attention.sliding_window")
    stated = fields.data.get("attention.sliding_window_pattern")
    if isinstance(stated, list):
        flags = fields.maybe_list("attention.sliding_window_pattern", length=num_layers) or []
        return [window if flag else None for flag in flags]
    period = fields.maybe_integer("attention.sliding_window_pattern", high=10_000) or pattern.period
    return [None if (index + 1) % period == 0 else window for index in range(num_layers)]


def _rope(facts: DecoderFacts, fields: Fields, head_dim: int, window: int | None, factors: _Factors) -> Rope:
    rotary_dim = fields.maybe_integer("rope.dimension_count", high=head_dim) or head_dim
    if rotary_dim % 2:
        raise BadValue(f"{fields.where}: rope.dimension_count = {rotary_dim} must be even")
    if window is not None and facts.local_rope_theta is not None:
        return Rope(fields.maybe_number("rope.freq_base_swa") or facts.local_rope_theta, rotary_dim)
    theta = fields.maybe_number("rope.freq_base") or facts.rope_theta
    if factors.short is not None and factors.long is not None:
        return Rope(theta, rotary_dim, _longrope(fields, factors.short, factors.long))
    return Rope(theta, rotary_dim, None if factors.plain else _scaling(fields), factors.plain)


def _longrope(fields: Fields, short: tuple[float, ...], long: tuple[float, ...]) -> LongRope:
    original = fields.integer("rope.scaling.original_context_length")
    stretch = fields.maybe_number("rope.scaling.attn_factor", high=1e3)
    if stretch is None:
        stretch = long_stretch(fields.integer("context_length") / original, original)
    return LongRope(short, long, original, stretch)


def _scaling(fields: Fields) -> RopeScaling | None:
    kind = fields.maybe_text("rope.scaling.type")
    factor = fields.maybe_number("rope.scaling.factor", "rope.scale_linear", high=1e6)
    if kind == "linear" or (kind is None and factor not in (None, 1.0)):
        return LinearScaling(factor) if factor else None
    if kind not in (None, "none"):
        raise BadValue(
            f"{fields.where}: rope scaling {kind!r} is not supported; supported are none, linear and rope_freqs"
        )
    return None


def _divisors(file: GgufFile, name: str) -> tuple[float, ...] | None:
    """The frequency divisors in tensor ``name`` (llama 3 scaling is ``rope_freqs.weight``), or None."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.kind.name != "f32" or len(tensor.shape) != 1:
        raise BadValue(f"{file.path}: {name} is {tensor.kind.name} {list(tensor.shape)}, expected one f32 row")
    values = struct.unpack(f"<{tensor.shape[0]}f", file.read_rows(tensor.name))
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise BadValue(f"{file.path}: {name} holds a divisor that is not positive")
    return tuple(values)
