"""GGUF metadata to ModelSpec, fail-closed."""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvist.base.errors import BadValue, SpecError, UnknownArchitecture
from kvist.spec.families import BY_GGUF, DecoderFacts, Family, runnable_names
from kvist.spec.from_config import check_groups
from kvist.spec.gguf_file import GgufFile, read_gguf
from kvist.spec.model import Attention, FeedForward, LayerSpec, LinearScaling, ModelSpec, Norm, Rope, RopeScaling
from kvist.spec.read import Fields

# Fields that would change the arithmetic of a decoder and that no runnable family here uses.
_UNSUPPORTED = ("expert_count", "embedding_scale", "residual_scale", "logit_scale", "attention.layer_norm_epsilon")
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A GGUF file and the model it describes. ``permuted_qk``: q and k rows are interleaved (names.half_split_rows)."""

    file: GgufFile
    spec: ModelSpec
    permuted_qk: bool


def gguf_model(source: GgufFile | str | Path) -> GgufModel:
    """Header and runnable spec of the GGUF file ``source``. Errors as in ``read_gguf`` and ``model_spec``."""
    file = source if isinstance(source, GgufFile) else read_gguf(source)
    architecture = file.metadata.get("general.architecture")
    family = BY_GGUF.get(architecture) if isinstance(architecture, str) else None
    if family is None or family.decoder is None:
        state = "unknown" if family is None else "not runnable yet:"
        raise UnknownArchitecture(f"{file.path}: {state} architecture {architecture!r}; runnable: {runnable_names()}")
    if file.metadata.get("split.count", 1) != 1:
        raise SpecError(
            f"{file.path}: one of {file.metadata['split.count']} parts; join them with llama-gguf-split --merge"
        )
    prefix = f"{architecture}."
    data = {key[len(prefix) :]: value for key, value in file.metadata.items() if key.startswith(prefix)}
    spec = _spec(family, family.decoder, Fields(data, f"{file.path}: {architecture}"), file)
    return GgufModel(file, spec, family.decoder.gguf_permuted_qk)


def _spec(family: Family, facts: DecoderFacts, fields: Fields, file: GgufFile) -> ModelSpec:
    for name in _UNSUPPORTED:
        if fields.data.get(name):
            raise BadValue(f"{fields.where}: {name} = {fields.data[name]} is not supported by family {family.name}")
    num_layers = fields.integer("block_count", high=10_000)
    hidden = fields.integer("embedding_length", high=2**20)
    # Gemma's GGUF norms have their 1 added already, so the offset is 0 in every family.
    norm = Norm("rms", fields.number("attention.layer_norm_rms_epsilon", high=1.0))
    widths = _per_layer(fields, "feed_forward_length", num_layers, 2**24)
    attentions = _attentions(facts, fields, file, num_layers, hidden)
    has_ffn_bias = "blk.0.ffn_gate.bias" in file.tensors
    layers = tuple(
        LayerSpec(attention, FeedForward(width, facts.activation, has_ffn_bias), norm, facts.post_norms)
        for attention, width in zip(attentions, widths, strict=True)
    )
    special = Fields(_tail(file.metadata, "tokenizer.ggml."), f"{file.path}: tokenizer.ggml")
    stops = [special.maybe_integer(key, low=0) for key in _STOP_KEYS]
    return ModelSpec(
        architecture=str(file.metadata["general.architecture"]),
        family=family.name,
        hidden_size=hidden,
        vocab_size=_vocab_size(fields, file),
        layers=layers,
        norm=norm,
        max_position=fields.integer("context_length", high=2**31),
        tied_embeddings="output.weight" not in file.tensors,
        dtype=main_type(file),
        embedding_scale=math.sqrt(hidden) if facts.scaled_embedding else 1.0,
        logit_softcap=fields.maybe_number("final_logit_softcapping"),
        bos_token_id=special.maybe_integer("bos_token_id", low=0),
        eos_token_ids=tuple(dict.fromkeys(stop for stop in stops if stop is not None)),
    )


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


def _attentions(facts: DecoderFacts, fields: Fields, file: GgufFile, num_layers: int, hidden: int) -> list[Attention]:
    heads = _per_layer(fields, "attention.head_count", num_layers, 2**16)
    kv_heads = (
        heads
        if fields.raw("attention.head_count_kv") is None
        else _per_layer(fields, "attention.head_count_kv", num_layers, 2**16)
    )
    windows = _windows(facts, fields, num_layers)
    divisors = _divisors(file)
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
                rope=_rope(facts, fields, head_dim, window, divisors),
                qk_norm=facts.qk_norm,
                qkv_bias=f"blk.{index}.attn_q.bias" in file.tensors,
                out_bias=f"blk.{index}.attn_output.bias" in file.tensors,
                softcap=fields.maybe_number("attn_logit_softcapping"),
            )
        )
    return result


def _windows(facts: DecoderFacts, fields: Fields, num_layers: int) -> list[int | None]:
    """The window of each layer; ``sliding_window_pattern`` is a period or a list of flags (true: windowed)."""
    if facts.pattern is None:
        return [fields.maybe_integer("attention.sliding_window")] * num_layers
    window = fields.integer("attention.sliding_window")
    stated = fields.data.get("attention.sliding_window_pattern")
    if isinstance(stated, list):
        flags = fields.maybe_list("attention.sliding_window_pattern", length=num_layers) or []
        return [window if flag else None for flag in flags]
    period = fields.maybe_integer("attention.sliding_window_pattern", high=10_000) or facts.pattern
    return [None if (index + 1) % period == 0 else window for index in range(num_layers)]


def _rope(
    facts: DecoderFacts, fields: Fields, head_dim: int, window: int | None, divisors: tuple[float, ...] | None
) -> Rope:
    rotary_dim = fields.maybe_integer("rope.dimension_count", high=head_dim) or head_dim
    if rotary_dim % 2:
        raise BadValue(f"{fields.where}: rope.dimension_count = {rotary_dim} must be even")
    if window is not None and facts.local_rope_theta is not None:
        return Rope(fields.maybe_number("rope.freq_base_swa") or facts.local_rope_theta, rotary_dim)
    theta = fields.maybe_number("rope.freq_base") or facts.rope_theta
    return Rope(theta, rotary_dim, None if divisors else _scaling(fields), divisors)


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


def _divisors(file: GgufFile) -> tuple[float, ...] | None:
    """The frequency divisors of ``rope_freqs.weight`` (how GGUF stores llama 3 scaling), or None."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.kind.name != "f32" or len(tensor.shape) != 1:
        raise BadValue(
            f"{file.path}: rope_freqs.weight is {tensor.kind.name} {list(tensor.shape)}, expected one f32 row"
        )
    values = struct.unpack(f"<{tensor.shape[0]}f", file.read_rows(tensor.name))
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise BadValue(f"{file.path}: rope_freqs.weight holds a divisor that is not positive")
    return tuple(values)
