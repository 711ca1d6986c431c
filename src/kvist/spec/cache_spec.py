"""config.json to CacheSpec: what every layer keeps, for every architecture of the family table. Fail-closed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvist.base.errors import BadValue, UnknownArchitecture
from kvist.spec.families import Family, family_of, planned_names
from kvist.spec.from_config import read_config
from kvist.spec.kept import (
    CacheLayer,
    CacheSpec,
    CrossRows,
    IndexRows,
    KeyValueRows,
    LatentRows,
    Part,
    StateRows,
    VectorRows,
)
from kvist.spec.layer_kinds import layer_kinds
from kvist.spec.parameters import weight_bytes
from kvist.spec.read import Fields
from kvist.spec.rules import EXPERTS, HEADS, LAYERS, MAX_POSITION, Blocks, CacheRule, StateRule

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config.text_config")
_HEADS, _WIDTH, _LAYERS = 2**16, 2**14, 10_000


def cache_spec(config: Mapping[str, Any] | str | Path, *, assume_standard: bool = False) -> CacheSpec:
    """What the model that ``config`` describes keeps: a mapping, a config.json, or the folder that holds one.

    ``assume_standard`` applies the plain rule (every layer keeps keys and values of every token) to an architecture
    without a row, and marks the result as a guess. Raises UnknownArchitecture, MissingField, WrongType or BadValue.
    """
    if not isinstance(config, Mapping):
        config = read_config(Path(config))
    outer = Fields(config, "config.json")
    inner, where = _inner(outer)
    model_type = inner.maybe_text("model_type") or outer.maybe_text("model_type")
    family = family_of(model_type)
    guess = family is None
    if family is None:
        if not assume_standard:
            if model_type is None:
                raise outer.missing("model_type")
            raise UnknownArchitecture(
                f"config.json: no row for architecture {model_type!r}; known are {planned_names()}."
                " --assume-standard applies the plain rule and marks the answer as a guess"
            )
        family = Family("standard (guess)", (), cache=CacheRule())
    fields = Fields(inner.data, where, family.class_defaults if inner is not outer else {})
    return _Builder(family, fields, outer, guess).spec(None)


def spec_from_fields(family: Family, fields: Fields, weights: tuple[int, str]) -> CacheSpec:
    """The CacheSpec of ``fields`` under ``family``'s rule, with known ``weights`` (bytes, where from)."""
    return _Builder(family, fields, fields, False).spec(weights)


def _inner(outer: Fields) -> tuple[Fields, str]:
    for name in _NESTED:
        value = outer.get(name)
        if isinstance(value, Mapping):
            return Fields(value, f"config.json: {name}"), f"config.json: {name}"
    return outer, outer.where


class _Builder:
    """One pass over a config; what has to be looked up once is looked up here."""

    def __init__(self, family: Family, fields: Fields, outer: Fields, guess: bool) -> None:
        self.family, self.rule, self.fields, self.outer, self.guess = family, family.cache, fields, outer, guess
        self.notes: list[str] = []
        self.num_layers = 0 if self.rule.encoder_only else self.agreed(self.rule.layers, _LAYERS)
        self.max_position = fields.maybe_integer(*MAX_POSITION, high=2**31)

    def spec(self, weights: tuple[int, str] | None) -> CacheSpec:
        """The whole record; ``weights`` where they are known already."""
        rule, fields = self.rule, self.fields
        heads = self.agreed(rule.heads, _HEADS) if rule.heads and not rule.encoder_only else 0
        layers = () if rule.encoder_only else tuple(self.layers(heads))
        if rule.encoder_only:
            self.notes.append("an encoder reads every token at once: there is no cache to keep")
        mtp = (fields.maybe_integer(*rule.mtp, low=0, high=64) or 0) if layers else 0
        if mtp:
            self.notes.append(f"{mtp} multi-token-prediction layers keep rows only when that is switched on")
        if (fields.maybe_integer(*EXPERTS, low=0, high=2**20) or 0) > 1 and layers:
            self.notes.append(
                "a mixture of experts: a step reads only the experts that its tokens choose, so reading all weights is"
                " the slow end"
            )
        dtype, source = self.dtype()
        architectures = self.outer.maybe_list("architectures")
        nbytes, told = weights or weight_bytes(fields, self.outer, layers, heads, dtype)
        return CacheSpec(
            architecture=str(architectures[0]) if architectures else self.family.name,
            family=self.family.name,
            layers=layers,
            num_heads=heads,
            max_position=self.max_position,
            dtype=dtype,
            dtype_source=source,
            runnable=self.family.decoder is not None,
            mtp_layers=mtp,
            mtp_layer=next((c for c in reversed(layers) if c.kind in ("full", "mla")), None) if mtp else None,
            encoder_only=rule.encoder_only,
            guess=self.guess,
            weights_bytes=nbytes,
            weights_source=told,
            assumed=tuple(f"{n} = {v} is the class default" for n, v in sorted(fields.assumed.items())),
            notes=tuple(self.notes),
        )

    def agreed(self, names: tuple[str, ...], high: int) -> int:
        """The integer under one of ``names``; BadValue when two of them are given and differ."""
        value = self.fields.integer(*names, high=high)
        first = self.fields.present(*names)
        for name in names:
            other = self.fields.get(name)
            if first is not None and isinstance(other, int) and other != value and names in (LAYERS, HEADS):
                raise BadValue(f"{self.fields.where}: {first} = {value} and {name} = {other} contradict each other")
        return value

    def dtype(self) -> tuple[str | None, str]:
        """The checkpoint's element type and the field it came from."""
        for source in (self.fields, self.outer):
            name = source.present("dtype", "torch_dtype")
            if name is not None:
                return source.maybe_text(name), f"{source.where}: {name}"
        return None, "the config names no type"

    def layers(self, heads: int) -> list[CacheLayer]:
        """One record per layer, shared and empty ones included."""
        rule = self.rule
        if rule.vectors is not None:
            return self.vector_layers(rule.vectors)
        kinds = layer_kinds(rule, self.fields, self.num_layers)
        window = self.window(kinds)
        made = [self.layer(index, kind, heads, window) for index, kind in enumerate(kinds)]
        made = [layer for layer in made for _ in range(rule.sublayers)]
        return self.share(made, kinds)

    def window(self, kinds: list[str]) -> int | None:
        """The window of windowed layers; None when switched off or not below the longest context."""
        if "swa" not in kinds:
            return None
        names = self.rule.window
        found = self.fields.maybe_integer(*names, low=0)
        if found is None and self.rule.window_given and not any(name in self.fields.data for name in names):
            raise self.fields.missing(*names, why="windowed layers keep that many tokens; null switches the window off")
        if not found:
            return None
        if self.max_position is not None and found >= self.max_position:
            self.notes.append(
                f"the window of {found} is not below the longest context of {self.max_position}: no effect"
            )
            return None
        return found

    def layer(self, index: int, kind: str, heads: int, window: int | None) -> CacheLayer:
        """The record of layer ``index``, whose pattern says ``kind``."""
        rule = self.rule
        if kind in ("none", "shared"):
            return CacheLayer(kind)
        if rule.state is not None and kind == rule.state.kind:
            return CacheLayer(kind, (self.state(rule.state),))
        if rule.cross is not None and rule.cross.layers is not None and index in self.cross_indices(rule.cross.layers):
            rows = self.rows(index, "full", heads)
            return CacheLayer("cross", (CrossRows(rows.num_kv_heads, rows.head_dim, rows.v_head_dim, None),))
        if rule.latent:
            return self.latent(index, heads)
        rows = self.rows(index, kind, heads)
        if rows is None or rows.num_kv_heads == 0:
            return CacheLayer("none")
        mha = heads * (rows.head_dim + rows.v_head_dim)
        parts: list[Part] = [rows]
        if kind == "swa" and window is not None:
            parts[0] = replace(rows, window=window)
        elif kind == "chunk" and rule.chunk is not None and (chunk := self.fields.maybe_integer(rule.chunk)):
            parts[0] = replace(rows, chunk=chunk)
        else:
            kind = "full"
        if rule.state is not None and (rule.parallel_state or kind == "hybrid"):
            parts.append(self.state(rule.state))
        parts.extend(self.index(index))
        if rule.cross is not None and rule.cross.layers is None:
            tokens = rule.cross.tokens
            count = self.fields.maybe_integer(tokens) if isinstance(tokens, str) else tokens
            parts.append(CrossRows(rows.num_kv_heads, rows.head_dim, rows.v_head_dim, count))
        return CacheLayer(kind, tuple(parts), mha_elements=mha)

    def cross_indices(self, field: str) -> list[int]:
        """The layers that attend to another sequence."""
        listed = self.fields.maybe_list(field)
        if listed is None:
            raise self.fields.missing(field, why="it says which layers keep image rows")
        return [self.fields.as_integer(f"{field}[{i}]", v, 0, self.num_layers - 1) for i, v in enumerate(listed)]

    def rows(self, index: int, kind: str, heads: int) -> KeyValueRows:
        """Keys and values of one layer, without its window."""
        rule, fields = self.rule, self.fields
        width_field, v_field, kv_field = rule.overrides.get(kind, (None, None, None))
        kv_heads = self.kv_heads(index, heads)
        if kv_field is not None and (rule.override_if is None or fields.flag(rule.override_if, default=False)):
            kv_heads = fields.maybe_integer(kv_field, high=_HEADS) or kv_heads
        head_dim = (fields.maybe_integer(width_field, high=_WIDTH) if width_field else None) or self.head_dim(heads)
        v_names = (v_field,) if v_field else rule.v_head_dim
        v_head_dim = (fields.maybe_integer(*v_names, high=_WIDTH) if v_names else None) or head_dim
        if kv_heads and heads % kv_heads:
            raise BadValue(
                f"{fields.where}: {heads} query heads cannot be shared evenly by {kv_heads} kv heads"
                f" ({fields.present(*rule.heads)}, {fields.present(*rule.kv_heads)})"
            )
        return KeyValueRows(kv_heads, head_dim, v_head_dim)

    def kv_heads(self, index: int, heads: int) -> int:
        """kv heads of layer ``index``: a number, a list with one per layer, a flag that means one, or all heads."""
        rule, fields = self.rule, self.fields
        if rule.one_kv_head is not None:
            flag, default, unless = rule.one_kv_head
            if not (unless and fields.flag(unless, default=False)) and fields.flag(flag, default=default):
                return 1
        if rule.kv_heads_if is not None and not fields.flag(rule.kv_heads_if, default=False):
            return heads
        if isinstance(rule.pattern, Blocks):
            shared = block_group(fields, rule.pattern, index, self.num_layers)
            if shared is not None:
                return heads // shared if shared else 0
        names = ("num_key_value_heads_per_layer", *rule.kv_heads) if rule.kv_heads else ()
        found = fields.raw(*names)
        if found is None:
            return heads
        if isinstance(found[1], list):
            listed = fields.maybe_list(found[0], length=self.num_layers) or []
            return fields.as_integer(f"{found[0]}[{index}]", listed[index], 0, _HEADS)
        return fields.as_integer(found[0], found[1], 1, _HEADS)

    def head_dim(self, heads: int) -> int:
        """Width of a head: given, or hidden size over heads where the architecture says so."""
        rule, fields = self.rule, self.fields
        given = fields.maybe_integer(*rule.head_dim, high=_WIDTH)
        if given is not None:
            return given
        if rule.head_dim_given:
            raise fields.missing(*rule.head_dim, why=f"family {self.family.name} does not derive it from hidden_size")
        hidden = fields.integer(*rule.hidden, high=2**20) * rule.width_factor
        if hidden % heads:
            raise BadValue(
                f"{fields.where}: {fields.present(*rule.hidden)} {hidden} is not a multiple of"
                f" {fields.present(*rule.heads)} {heads}, and head_dim is absent; give head_dim"
            )
        return hidden // heads

    def latent(self, index: int, heads: int) -> CacheLayer:
        """A latent layer; its kv heads and head_dim fields say nothing about the cache and are not read."""
        fields = self.fields
        rank = fields.integer("kv_lora_rank", high=2**16)
        rope = fields.integer("qk_rope_head_dim", low=0, high=_WIDTH)
        nope = fields.maybe_integer("qk_nope_head_dim", low=0, high=_WIDTH)
        value = fields.maybe_integer("v_head_dim", high=_WIDTH)
        mha = heads * (nope + value) if nope is not None and value is not None else 0
        rows = LatentRows(rank, rope, heads, nope, value)
        return CacheLayer("mla", (rows, *self.index(index)), mha_elements=mha)

    def index(self, index: int) -> list[Part]:
        """The indexer's key of layer ``index``, where there is one."""
        rule = self.rule.index
        if rule is None:
            return []
        width = self.fields.maybe_integer(rule.width, high=_WIDTH)
        if width is None:
            return []
        listed = self.fields.maybe_list(rule.layers, length=self.num_layers) if rule.layers else None
        return [] if listed is not None and listed[index] != rule.marks else [IndexRows(width)]

    def state(self, rule: StateRule) -> StateRows:
        """A recurrent state: products of fields."""
        channels = sum(self.product(rule, item) for item in rule.channels)
        kernel = rule.kernel if isinstance(rule.kernel, int) else self.product(rule, (rule.kernel,))
        dtype = self.fields.maybe_text(*rule.dtype_fields)
        return StateRows(self.product(rule, rule.state) if rule.state else 0, channels, kernel, dtype)

    def product(self, rule: StateRule, items: tuple[str | int, ...]) -> int:
        """The product of fields and numbers."""
        total = 1
        for item in items:
            if isinstance(item, int):
                total *= item
                continue
            value = self.fields.maybe_integer(item, high=2**20)
            if value is None:
                value = rule.defaults.get(item)
                if value is None:
                    raise self.fields.missing(item, why=f"it decides the size of the {rule.kind} state")
                self.fields.assumed[item] = value
            total *= value
        return total

    def share(self, layers: list[CacheLayer], kinds: list[str]) -> list[CacheLayer]:
        """Replace layers that read another layer's rows: a tail, every second one, or those the pattern marks."""
        rule, fields = self.rule, self.fields
        tail = (fields.maybe_integer(rule.shared_tail, low=0, high=len(layers)) or 0) if rule.shared_tail else 0
        first = len(layers) - tail
        factor = 1
        if rule.share_every is not None and fields.flag(rule.share_every[0], default=False):
            factor = fields.integer(rule.share_every[1], high=_LAYERS)
        result = []
        for index, layer in enumerate(layers):
            if index >= first:
                owners = [i for i in range(first) if kinds[i] == kinds[index]]
                if not owners:
                    raise BadValue(
                        f"{fields.where}: {rule.shared_tail} = {tail} leaves layer {index} no layer to share with"
                    )
                layer = CacheLayer("shared", shared_with=owners[-1], mha_elements=layer.mha_elements)
            elif index % factor:
                layer = CacheLayer("shared", shared_with=index - index % factor, mha_elements=layer.mha_elements)
            elif layer.kind == "shared":
                owner = max(i for i in range(index) if layers[i].kind == "full")
                layer = CacheLayer("shared", shared_with=owner, mha_elements=layers[owner].mha_elements)
            result.append(layer)
        return result

    def vector_layers(self, field: str) -> list[CacheLayer]:
        """A short window everywhere and one vector per ``ratio`` tokens; layers of ratio 4 have an indexer."""
        fields = self.fields
        ratios = fields.maybe_list(field)
        if ratios is None:
            raise fields.missing(field, why="it says how far each layer compresses")
        if len(ratios) < self.num_layers:
            raise BadValue(f"{fields.where}: {field} has {len(ratios)} entries for {self.num_layers} layers")
        width, window = fields.integer("head_dim", high=_WIDTH), fields.integer(*self.rule.window)
        heads, layers = self.agreed(self.rule.heads, _HEADS), []
        for i in range(self.num_layers):
            ratio = fields.as_integer(f"{field}[{i}]", ratios[i], 0, 2**20)
            parts: list[Part] = [VectorRows(width, window=window)]
            if ratio:
                parts.append(VectorRows(width, stride=ratio))
            if ratio == 4:
                parts.append(IndexRows(fields.integer("index_head_dim", high=_WIDTH), stride=ratio))
            layers.append(CacheLayer("dsv4", tuple(parts), mha_elements=heads * 2 * width))
        return layers


def block_group(fields: Fields, pattern: Blocks, index: int, num_layers: int) -> int | None:
    """Query heads per kv head of block ``index`` (0: no attention); None when the config lists no blocks."""
    name = fields.present(pattern.field, f"{pattern.field}_attention")
    if name is None:
        return None
    block = (fields.maybe_list(name, length=num_layers) or [])[index]
    if isinstance(block, Mapping):
        attention = Fields(block, f"{fields.where}: {name}[{index}]").maybe_group("attention")
        if attention is None or attention.data.get("no_op") or attention.data.get("replace_with_linear"):
            return 0
        return attention.integer("n_heads_in_group", high=_HEADS)
    return 0 if block is None else fields.as_integer(f"{name}[{index}]", block, 1, _HEADS)
