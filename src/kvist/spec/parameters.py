"""How many bytes a model's weights take, from its config alone: an estimate that says what it is."""

from __future__ import annotations

from collections.abc import Sequence

from kvist.spec.kept import CacheLayer, KeyValueRows, LatentRows, StateRows
from kvist.spec.read import Fields
from kvist.spec.rules import EXPERTS

_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8_e4m3fn": 1.0, "float8": 1.0}
_QUANTISED = {"fp8": 1.0, "mxfp4": 17 / 32, "nvfp4": 36 / 64, "bitsandbytes": 0.5, "compressed-tensors": None}


def weight_bytes(
    fields: Fields, outer: Fields, layers: Sequence[CacheLayer], heads: int, dtype: str | None
) -> tuple[int | None, str]:
    """(bytes, where from): parameters counted from the config times the width of the checkpoint's type.

    None with a reason when a field that decides it is absent. Never exact: quantised checkpoints keep some
    tensors wide.
    """
    count = _parameters(fields, layers, heads)
    if isinstance(count, str):
        return None, f"unknown: the config does not give {count}"
    width, told = _width(fields, outer, dtype)
    return int(count * width), f"estimated: {count / 1e9:.2f} G parameters x {width:g} B ({told})"


def _width(fields: Fields, outer: Fields, dtype: str | None) -> tuple[float, str]:
    quantised = fields.get("quantization_config") or outer.get("quantization_config")
    if isinstance(quantised, dict):
        method, bits = quantised.get("quant_method"), quantised.get("bits")
        if isinstance(bits, int) and 1 <= bits <= 16:
            return bits / 8, f"{method}, {bits} bits"
        width = _QUANTISED.get(str(method))
        if width is not None:
            return width, str(method)
    return (_BYTES[dtype], dtype) if dtype in _BYTES else (2.0, "16 bits assumed")


def _parameters(fields: Fields, layers: Sequence[CacheLayer], heads: int) -> int | str:
    """The count, or the name of the first field that is missing."""
    hidden = fields.maybe_integer("hidden_size", "n_embd", "d_model", high=2**20)
    vocab = fields.maybe_integer("vocab_size", high=2**24)
    inner = fields.maybe_integer("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", high=2**24)
    experts = fields.maybe_integer(*EXPERTS, high=2**16)
    expert_width = fields.maybe_integer("moe_intermediate_size", "expert_ffn_hidden_size", high=2**24) or inner
    for name, value in (("hidden_size", hidden), ("vocab_size", vocab), ("intermediate_size", inner or expert_width)):
        if value is None:
            return name
    assert hidden is not None and vocab is not None
    total = vocab * hidden * (1 if fields.get("tie_word_embeddings") is True else 2)
    dense = fields.maybe_integer("first_k_dense_replace", low=0, high=10_000) or 0
    shared = fields.maybe_integer("n_shared_experts", "num_shared_experts", low=0, high=1024) or 0
    for index, layer in enumerate(layers):
        total += sum(_attention(part, heads, hidden, fields) for part in layer.parts)
        if experts is not None and index >= dense:
            total += 3 * hidden * (expert_width or 0) * (experts + shared) + hidden * experts
        else:
            total += 3 * hidden * (inner or expert_width or 0)
    return total


def _attention(part: object, heads: int, hidden: int, fields: Fields) -> int:
    match part:
        case KeyValueRows(kv_heads, key, value):
            return hidden * (heads * (key + value) + kv_heads * (key + value))
        case LatentRows(rank, rope, _, nope, value):
            width = (nope or 0) + rope
            q_rank = fields.maybe_integer("q_lora_rank", high=2**16)
            queries = hidden * heads * width if q_rank is None else q_rank * (hidden + heads * width)
            expand = rank * heads * ((nope or 0) + (value or 0))
            return queries + hidden * (rank + rope) + expand + heads * (value or 0) * hidden
        case StateRows(_, channels, kernel):
            return hidden * channels * 2 + channels * kernel
    return 0
