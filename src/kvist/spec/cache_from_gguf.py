"""GGUF metadata to CacheSpec: the header's keys are renamed to config fields, and the same family rules apply."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvist.base.errors import UnknownArchitecture
from kvist.spec.cache_spec import spec_from_fields
from kvist.spec.families import BY_GGUF, Family
from kvist.spec.from_gguf import main_type
from kvist.spec.gguf_file import GgufFile
from kvist.spec.gguf_split import read_model_file
from kvist.spec.kept import CacheSpec
from kvist.spec.read import Fields
from kvist.spec.rules import LAYERS, Coded, Every, Indexed, StateRule

_FIELDS = {
    "num_hidden_layers": ("block_count",),
    "hidden_size": ("embedding_length",),
    "num_key_value_heads": ("attention.head_count_kv",),
    "v_head_dim": ("attention.value_length_mla", "attention.value_length"),
    "max_position_embeddings": ("context_length",),
    "sliding_window": ("attention.sliding_window",),
    "kv_lora_rank": ("attention.kv_lora_rank",),
    "q_lora_rank": ("attention.q_lora_rank",),
    "qk_rope_head_dim": ("rope.dimension_count",),
    "num_kv_shared_layers": ("attention.shared_kv_layers",),
    "full_attention_interval": ("full_attention_interval",),
    "num_nextn_predict_layers": ("nextn_predict_layers",),
    "index_head_dim": ("attention.indexer.key_length",),
}
_STATE = StateRule(
    "state",
    state=("ssm.inner_size", "ssm.state_size"),
    channels=(("ssm.inner_size",), (2, "ssm.group_count", "ssm.state_size")),
    kernel="ssm.conv_kernel",
    defaults={"ssm.group_count": 1},
)
_MAMBA1 = replace(_STATE, channels=(("ssm.inner_size",),))
_SHORT_CONV = StateRule("shortconv", channels=(("embedding_length",),), kernel="shortconv.l_cache")


def gguf_cache_spec(source: GgufFile | str | Path) -> CacheSpec:
    """What the model in a GGUF file keeps, with the exact bytes of its tensors as its weights."""
    file = source if isinstance(source, GgufFile) else read_model_file(source)
    name = file.metadata.get("general.architecture")
    family = BY_GGUF.get(name) if isinstance(name, str) else None
    if family is None:
        raise UnknownArchitecture(f"{file.path}: no row for architecture {name!r}; known are {', '.join(BY_GGUF)}")
    head = f"{name}."
    data = {key[len(head) :]: value for key, value in file.metadata.items() if key.startswith(head)}
    where = f"{file.path.name}: {name}"
    if family.cache.encoder_only:
        data["num_hidden_layers"] = data.get("block_count")
    config = _config(data, where, family)
    spec = spec_from_fields(_family(family, data), Fields(config, where), weights=_weights(file))
    return replace(spec, architecture=str(name), dtype=main_type(file), dtype_source="the type of most tensor bytes")


def _weights(file: GgufFile) -> tuple[int, str]:
    parts = {tensor.part for tensor in file.tensors.values()}
    told = "exact: the tensors of the file" if len(parts) <= 1 else f"exact: the tensors of {len(parts)} parts"
    return sum(tensor.nbytes for tensor in file.tensors.values()), told


def _config(data: dict[str, Any], where: str, family: Family) -> dict[str, Any]:
    """The header's keys under the names that the rules read; what has no such name stays under its own."""
    config = dict(data)
    for field, keys in _FIELDS.items():
        value = next((data[key] for key in keys if data.get(key) is not None), None)
        if value is not None:
            config[field] = value
    heads = data.get("attention.head_count")
    listed = [value for value in heads if _positive(value)] if isinstance(heads, list) else []
    config["num_attention_heads"] = max(listed) if listed else heads
    key, key_swa = data.get("attention.key_length"), data.get("attention.key_length_swa")
    config["head_dim"] = key_swa or key
    if key_swa:
        config["global_head_dim"] = key
        config["v_head_dim"] = data.get("attention.value_length_swa")
    width, count = _positive(data.get("embedding_length")), _positive(config["num_attention_heads"])
    if config["head_dim"] is None and width and count and width % count == 0:
        config["head_dim"] = width // count
    rank, rope = _positive(config.get("kv_lora_rank")), _positive(config.get("qk_rope_head_dim"))
    full = _positive(data.get("attention.key_length_mla")) or _positive(key)
    if rank and rope and full and rope < full <= rank:
        # Without an _mla field key_length is the head's own width in old files, and rank + rope in new ones.
        config["qk_nope_head_dim"] = full - rope
    layers, nextn = _positive(data.get("block_count")), _positive(data.get("nextn_predict_layers"))
    if layers and nextn and nextn < layers:
        config["num_hidden_layers"] = layers - nextn
    _add_layer_types(config, data, family)
    return config


def _positive(value: object) -> int | None:
    """``value`` where it is a whole number above 0; anything else is left for the rules to refuse by name."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _add_layer_types(config: dict[str, Any], data: dict[str, Any], family: Family) -> None:
    """Layer lists: flags for windows, zeros among the kv heads for layers that keep a state or nothing."""
    pattern = data.get("attention.sliding_window_pattern")
    kv_heads, widths = data.get("attention.head_count_kv"), data.get("feed_forward_length")
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in pattern]
    elif isinstance(pattern, int):
        config["sliding_window_pattern"] = pattern
    elif isinstance(kv_heads, list) and family.cache.state is not None:
        state = family.cache.state.kind
        filled = widths if isinstance(widths, list) else []
        empty = [i < len(filled) and bool(_positive(filled[i])) for i in range(len(kv_heads))]
        has_plain = isinstance(family.cache.pattern, Coded) and "none" in family.cache.pattern.kinds.values()
        config["layer_types"] = [
            "full_attention" if heads else "mlp" if has_plain and empty[i] else _word(state)
            for i, heads in enumerate(kv_heads)
        ]


def _word(state: str) -> str:
    return "conv" if state == "shortconv" else "mamba"


def _family(family: Family, data: dict[str, Any]) -> Family:
    """The family's rule, with its state read from the header's own fields and its lists from the header's arrays."""
    rule = replace(family.cache, layers=LAYERS, v_head_dim=("v_head_dim",))
    if rule.state is not None:
        plain = {"shortconv": _SHORT_CONV, "mamba1": _MAMBA1}.get(rule.state.kind, _STATE)
        rule = replace(rule, state=replace(plain, kind=rule.state.kind))
    if rule.heads == () and isinstance(rule.pattern, Every):
        return replace(family, cache=rule)
    if isinstance(rule.pattern, Indexed | Coded) and not isinstance(data.get("attention.head_count_kv"), list):
        return replace(family, cache=rule)
    if "full" in rule.overrides and not data.get("attention.key_length_swa"):
        rule = replace(rule, overrides={})
    return replace(family, cache=rule)
