"""config.json to ModelSpec, fail-closed: what a runnable model needs is there and in range, or an error names it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvist.base.errors import BadValue, Corrupt, SpecError, UnknownArchitecture, UsageError
from kvist.spec.families import BY_MODEL_TYPE, DecoderFacts, Family, runnable_names
from kvist.spec.model import (
    Attention,
    FeedForward,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    Norm,
    Rope,
    RopeScaling,
)
from kvist.spec.read import Fields

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
_SCALINGS = ("default", "linear", "llama3")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def model_spec(config: Mapping[str, Any] | str | Path) -> ModelSpec:
    """The runnable model that ``config`` describes: a mapping, a config.json, or the folder that holds one.

    Raises UnknownArchitecture (with what is supported), MissingField, WrongType or BadValue with the field's name.
    """
    if not isinstance(config, Mapping):
        config = read_config(Path(config))
    family, fields, outer = locate(config)
    if family.decoder is None:
        raise SpecError(
            f"{fields.where}: {family.name} can be planned (`kvist plan`), but not run yet;"
            f" runnable: {runnable_names()}"
        )
    return _decoder(family, family.decoder, fields, outer)


def read_config(path: Path) -> dict[str, Any]:
    """The mapping in ``path`` (a config.json or its folder), with the stop tokens of generation_config.json added."""
    path = path / "config.json" if path.is_dir() else path
    config = _read_json(path)
    generation = path.with_name("generation_config.json")
    if generation.is_file():
        config = {**config, "_generation_eos": _read_json(generation).get("eos_token_id")}
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise Corrupt(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise Corrupt(f"{path} holds a {type(config).__name__}, not a model's settings")
    return config


def locate(config: Mapping[str, Any]) -> tuple[Family, Fields, Fields]:
    """The family row, the fields of the language model, and those of the whole config (the same unless nested)."""
    outer = Fields(config, "config.json")
    inner = outer.maybe_group("text_config")
    model_type = (inner or outer).maybe_text("model_type") or outer.maybe_text("model_type")
    if model_type is None:
        raise outer.missing("model_type")
    family = BY_MODEL_TYPE.get(model_type)
    if family is None:
        raise UnknownArchitecture(
            f"config.json: unknown architecture {model_type!r}; supported to run: {runnable_names()}"
        )
    if inner is None:
        return family, outer, outer
    # transformers writes nested configs as differences to their class, so only there may its defaults stand in.
    return family, Fields(inner.data, "config.json: text_config", family.class_defaults), outer


def _decoder(family: Family, facts: DecoderFacts, fields: Fields, outer: Fields) -> ModelSpec:
    num_layers = fields.integer("num_hidden_layers", high=10_000)
    hidden = fields.integer("hidden_size", high=2**20)
    norm = Norm("rms", fields.number("rms_norm_eps", high=1.0), facts.norm_offset)
    feed_forward = FeedForward(
        fields.integer("intermediate_size", high=2**24),
        _activation(fields, facts),
        fields.flag("mlp_bias", default=False),
    )
    attentions = _attentions(facts, fields, num_layers, hidden)
    layers = tuple(LayerSpec(attention, feed_forward, norm, facts.post_norms) for attention in attentions)
    architectures = outer.maybe_list("architectures")
    return ModelSpec(
        architecture=str(architectures[0]) if architectures else family.name,
        family=family.name,
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size", high=2**24),
        layers=layers,
        norm=norm,
        max_position=fields.integer("max_position_embeddings", high=2**31),
        tied_embeddings=_either(fields, outer, "tie_word_embeddings", facts.tied_embeddings),
        dtype=fields.maybe_text("dtype", "torch_dtype") or outer.maybe_text("dtype", "torch_dtype") or "float32",
        embedding_scale=math.sqrt(hidden) if facts.scaled_embedding else 1.0,
        logit_softcap=fields.maybe_number("final_logit_softcapping"),
        bos_token_id=_bos(facts, fields, outer),
        eos_token_ids=_eos(facts, fields, outer),
        notes=tuple(f"{name} = {value} is the class default" for name, value in sorted(fields.assumed.items())),
    )


def _either(fields: Fields, outer: Fields, name: str, default: bool) -> bool:
    return fields.flag(name, default=outer.flag(name, default=default))


def _activation(fields: Fields, facts: DecoderFacts) -> str:
    name = fields.maybe_text("hidden_activation", "hidden_act")
    if name is None:
        return facts.activation
    if name not in _ACTIVATIONS:
        raise BadValue(f"{fields.where}: activation {name!r} is not supported; use one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _attentions(facts: DecoderFacts, fields: Fields, num_layers: int, hidden: int) -> list[Attention]:
    num_heads = fields.integer("num_attention_heads", high=2**16)
    num_kv_heads = fields.maybe_integer("num_key_value_heads", high=2**16) or num_heads
    head_dim = fields.maybe_integer("head_dim", high=2**14)
    if head_dim is None:
        if hidden % num_heads:
            raise BadValue(
                f"{fields.where}: hidden_size {hidden} is not a multiple of num_attention_heads {num_heads},"
                " and head_dim is absent; give head_dim"
            )
        head_dim = hidden // num_heads
    check_groups(fields.where, num_heads, num_kv_heads)
    if fields.flag("use_bidirectional_attention", default=False):
        raise BadValue(f"{fields.where}: use_bidirectional_attention is true; only causal attention can be run")
    scalar = fields.number("query_pre_attn_scalar") if facts.query_scalar else float(head_dim)
    bias = fields.flag("attention_bias", default=False)
    kinds = _layer_kinds(facts, fields, num_layers)
    window = fields.integer("sliding_window", high=2**31) if _SLIDING in kinds else None
    ropes = {kind: _rope(facts, fields, kind, head_dim) for kind in set(kinds)}

    def attention(kind: str) -> Attention:
        return Attention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            scale=1.0 / math.sqrt(scalar),
            window=window if kind == _SLIDING else None,
            rope=ropes[kind],
            qk_norm=facts.qk_norm,
            qkv_bias=bias,
            out_bias=bias,
            softcap=fields.maybe_number("attn_logit_softcapping"),
        )

    return [attention(kind) for kind in kinds]


def check_groups(where: str, num_heads: int, num_kv_heads: int) -> None:
    """BadValue unless the query heads divide evenly over the kv heads."""
    if num_heads % num_kv_heads:
        raise BadValue(
            f"{where}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads};"
            " every kv head must serve the same number of query heads"
        )


def _layer_kinds(facts: DecoderFacts, fields: Fields, num_layers: int) -> list[str]:
    """The attention kind of each layer: ``full_attention`` or ``sliding_attention``."""
    kinds = fields.maybe_list("layer_types", length=num_layers)
    if kinds is not None:
        allowed = (_FULL, _SLIDING) if facts.pattern else (_FULL,)
        for index, kind in enumerate(kinds):
            if kind not in allowed:
                raise BadValue(f"{fields.where}: layer_types[{index}] = {kind!r}; allowed are {', '.join(allowed)}")
        return [str(kind) for kind in kinds]
    if facts.pattern is None:
        return [_FULL] * num_layers
    pattern = fields.maybe_integer("sliding_window_pattern", "_sliding_window_pattern", high=10_000) or facts.pattern
    return [_FULL if (index + 1) % pattern == 0 else _SLIDING for index in range(num_layers)]


def _rope(facts: DecoderFacts, fields: Fields, kind: str, head_dim: int) -> Rope:
    """The rotary embedding of layers of ``kind``: per-kind or plain ``rope_parameters``, or the older loose fields."""
    local = kind == _SLIDING and facts.local_rope_theta is not None
    settings = fields.maybe_group("rope_parameters")
    if settings is not None and facts.local_rope_theta is not None and settings.present(_FULL, _SLIDING):
        settings = settings.maybe_group(kind)
    elif settings is None and not local:
        settings = fields.maybe_group("rope_scaling")
    elif local:
        settings = None  # The window's base has its own field, and is never scaled.
    settings = settings or Fields({}, fields.where)
    theta = settings.maybe_number("rope_theta")
    if theta is None:
        theta = fields.maybe_number("rope_local_base_freq" if local else "rope_theta")
    if theta is None:
        theta = facts.local_rope_theta if local else facts.rope_theta
    assert theta is not None
    factor = settings.maybe_number("partial_rotary_factor", high=1.0) or fields.maybe_number(
        "partial_rotary_factor", high=1.0
    )
    rotary_dim = int(head_dim * (factor or 1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise BadValue(
            f"{fields.where}: {rotary_dim} rotary channels (of head_dim {head_dim}); an even number is needed"
        )
    return Rope(theta, rotary_dim, _scaling(settings, fields))


def _scaling(settings: Fields, fields: Fields) -> RopeScaling | None:
    kind = settings.maybe_text("rope_type", "type")
    match kind:
        case None if settings.present("factor"):
            raise settings.missing("rope_type", why="a scaling factor is given")
        case None | "default":
            return None
        case "linear":
            return LinearScaling(settings.number("factor", high=1e6))
        case "llama3":
            low, high = settings.number("low_freq_factor", high=1e6), settings.number("high_freq_factor", high=1e6)
            if low >= high:
                raise BadValue(f"{settings.where}: low_freq_factor {low} must be below high_freq_factor {high}")
            original = settings.maybe_integer("original_max_position_embeddings") or fields.integer(
                "original_max_position_embeddings", "max_position_embeddings"
            )
            return Llama3Scaling(settings.number("factor", high=1e6), low, high, original)
        case _:
            raise BadValue(
                f"{settings.where}: rope scaling {kind!r} is not supported; supported are {', '.join(_SCALINGS)}"
            )


def _bos(facts: DecoderFacts, fields: Fields, outer: Fields) -> int | None:
    found = fields.maybe_integer("bos_token_id", low=0)
    if found is None:
        found = outer.maybe_integer("bos_token_id", low=0)
    return facts.bos_token_id if found is None else found


def _eos(facts: DecoderFacts, fields: Fields, outer: Fields) -> tuple[int, ...]:
    """Every stop token that the text config, the whole config or the generation settings name, in that order."""
    ids: list[int] = []
    for source, name in ((fields, "eos_token_id"), (outer, "eos_token_id"), (outer, "_generation_eos")):
        value = source.data.get(name)
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            number = source.as_integer(name, item, 0, 2**31)
            if number not in ids:
                ids.append(number)
    if not ids and facts.eos_token_id is not None:
        ids.append(facts.eos_token_id)
    return tuple(ids)
