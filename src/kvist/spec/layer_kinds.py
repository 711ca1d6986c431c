"""Which kind each layer is: a list in the config where there is one, else the family's pattern."""

from __future__ import annotations

from typing import assert_never

from kvist.base.errors import BadValue
from kvist.spec.read import Fields
from kvist.spec.rules import Blocks, CacheRule, Coded, Every, Halves, Indexed, Offset, Periodic, Windowed

_WORDS = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "global_attention": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "swa",
    "local": "swa",
    "chunked_attention": "chunk",
    "hybrid": "hybrid",
    "mlp": "none",
    "moe": "none",
}
# Words for "this layer has a state"; the family says which state it is.
_STATES = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "kda", "lightning_attention")


def layer_kinds(rule: CacheRule, fields: Fields, num_layers: int) -> list[str]:
    """The kind of every layer: full, swa, chunk, none, shared, hybrid, or the kind of the family's state."""
    words = fields.maybe_list("layer_types", "layers_block_type", length=num_layers)
    if words is not None and not isinstance(rule.pattern, Blocks):
        return [_word(rule, fields, index, word) for index, word in enumerate(words)]
    return _pattern(rule, fields, num_layers)


def _word(rule: CacheRule, fields: Fields, index: int, word: object) -> str:
    if isinstance(word, str) and word in _WORDS:
        return _WORDS[word]
    if word in _STATES and rule.state is not None:
        return rule.state.kind
    allowed = [*_WORDS, *(_STATES if rule.state else ())]
    raise BadValue(f"{fields.where}: layer_types[{index}] = {word!r}; known are {', '.join(allowed)}")


def _pattern(rule: CacheRule, fields: Fields, num_layers: int) -> list[str]:
    pattern = rule.pattern
    match pattern:
        case Every(kind):
            return [kind] * num_layers
        case Windowed(gate, from_layer):
            if gate is not None and not fields.flag(gate, default=False):
                return ["full"] * num_layers
            first = (fields.maybe_integer(from_layer, low=0, high=10_000) or 0) if from_layer else 0
            return ["swa" if index >= first else "full" for index in range(num_layers)]
        case Periodic():
            return _periodic(pattern, fields, num_layers)
        case Offset(period_field, offset_field, kind, other):
            period = fields.integer(period_field, high=10_000)
            offset = fields.integer(offset_field, low=0, high=period - 1)
            return [kind if index % period == offset else other for index in range(num_layers)]
        case Indexed(name, base, kind, other):
            listed = fields.maybe_list(name)
            if listed is None:
                raise fields.missing(name, "layer_types", why=f"it says which layers are {kind}")
            chosen = {
                fields.as_integer(f"{name}[{i}]", item, base, num_layers - 1 + base) - base
                for i, item in enumerate(listed)
            }
            return [kind if index in chosen else other for index in range(num_layers)]
        case Coded():
            return _coded(pattern, fields, num_layers)
        case Blocks():
            return ["full"] * num_layers
        case Halves(step_field):
            return _halves(fields.integer(step_field, high=2), fields, num_layers, rule)
    assert_never(pattern)


def _periodic(pattern: Periodic, fields: Fields, num_layers: int) -> list[str]:
    found = fields.raw(*pattern.fields)
    if found is not None and isinstance(found[1], str) and set(found[1]) <= {"L", "G"} and found[1]:
        letters = found[1]
        return [pattern.kind if letters[i % len(letters)] == "G" else pattern.other for i in range(num_layers)]
    if found is not None and isinstance(found[1], list):
        flags = fields.maybe_list(found[0], length=num_layers) or []
        return [pattern.other if flag else pattern.kind for flag in flags]
    period = fields.maybe_integer(*pattern.fields, high=10_000) or pattern.period
    return [pattern.kind if (index + 1) % period == 0 else pattern.other for index in range(num_layers)]


def _coded(pattern: Coded, fields: Fields, num_layers: int) -> list[str]:
    found = fields.raw(pattern.field)
    if found is None or (found[1] == [] and pattern.fallback):
        if pattern.fallback is None:
            raise fields.missing(pattern.field, "layer_types", why="it says of which kind each layer is")
        return _periodic(pattern.fallback, fields, num_layers)
    codes = list(found[1]) if isinstance(found[1], str | list) else []
    if pattern.cycled and codes:
        codes = [codes[index % len(codes)] for index in range(num_layers)]
    if len(codes) != num_layers:
        raise BadValue(
            f"{fields.where}: {pattern.field} has {len(codes)} entries, but the model has {num_layers} layers"
        )
    kinds = []
    for index, code in enumerate(codes):
        kind = pattern.kinds.get(code) if isinstance(code, int | str) else None
        if kind is None:
            known = ", ".join(map(repr, pattern.kinds))
            raise BadValue(f"{fields.where}: {pattern.field}[{index}] = {code!r}; known are {known}")
        kinds.append(kind)
    return kinds


def _halves(step: int, fields: Fields, num_layers: int, rule: CacheRule) -> list[str]:
    if step != 2 or num_layers % 4 or rule.state is None:
        raise BadValue(f"{fields.where}: {num_layers} layers in steps of {step} do not split into the two known halves")
    middle = num_layers // 2
    kinds = []
    for index in range(num_layers):
        if index % 2 == 0:
            kinds.append(rule.state.kind if index <= middle else "none")
        else:
            kinds.append("swa" if index < middle else "full" if index == middle + 1 else "shared")
    return kinds
