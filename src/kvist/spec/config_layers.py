"""The layers that a config.json describes: heads, windows and biases of each, by the facts of its family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kvist.base.errors import BadValue
from kvist.spec.config_feeds import feed_forwards, is_set
from kvist.spec.config_latent import latent_attention
from kvist.spec.config_rope import FULL, SLIDING, rope_of
from kvist.spec.facts import DecoderFacts, Family
from kvist.spec.layer_kinds import layer_kinds
from kvist.spec.model import Attention, LatentAttention, LayerSpec, Norm, Rope
from kvist.spec.read import Fields
from kvist.spec.rules import Windowed


def layers_of(
    family: Family, facts: DecoderFacts, fields: Fields, hidden: int, norm: Norm, residual_scale: float = 1.0
) -> tuple[LayerSpec, ...]:
    """Every layer of a decoder. Raises as ``model_spec`` does."""
    num_layers = fields.integer(*family.cache.layers, high=10_000)
    parallel = is_set(fields, facts.parallel)
    one_norm = facts.one_norm_unless is not None and parallel and _norms(fields, facts.one_norm_unless) == 1
    attentions: Sequence[Attention | LatentAttention]
    if facts.latent is None:
        attentions = _attentions(family, facts, fields, num_layers, hidden)
    else:
        num_heads = fields.integer(*family.cache.heads, high=2**16)
        attentions = [latent_attention(facts, facts.latent, fields, num_heads, hidden)] * num_layers
    return tuple(
        LayerSpec(
            attention=attention,
            feed_forward=feed_forward,
            norm=norm,
            post_norms=facts.post_norms,
            pre_norms=facts.pre_norms,
            parallel=parallel,
            shared_norm=one_norm,
            residual_scale=residual_scale,
        )
        for attention, feed_forward in zip(attentions, feed_forwards(facts, fields, num_layers, hidden), strict=True)
    )


def _norms(fields: Fields, flag: str) -> int:
    """How many norms parallel branches have: two where ``flag`` is set, unless a count says one."""
    two = fields.flag(flag, default=False)
    return fields.maybe_integer("num_ln_in_parallel_attn", low=1, high=2) or 2 if two else 1


def _attentions(family: Family, facts: DecoderFacts, fields: Fields, num_layers: int, hidden: int) -> list[Attention]:
    num_heads = fields.integer(*family.cache.heads, high=2**16)
    num_kv_heads = _kv_heads(family, fields, num_heads)
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
    scale = 1.0 / math.sqrt(fields.number("query_pre_attn_scalar") if facts.query_scalar else head_dim)
    if facts.multipliers == "granite":
        scale = fields.maybe_number("attention_multiplier", high=1e6) or 1.0
    kinds = _kinds(family, facts, fields, num_layers)
    window = fields.integer("sliding_window", high=2**31) if SLIDING in kinds else None
    ropes: dict[str, Rope | None] = {
        kind: None if facts.learned_positions else rope_of(facts, fields, kind, head_dim) for kind in set(kinds)
    }
    plain = Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        scale=scale,
        qk_norm=facts.qk_norm,
        qk_norm_whole=facts.qk_norm_whole,
        qkv_bias=is_set(fields, facts.qkv_bias),
        out_bias=is_set(fields, facts.out_bias),
        softcap=softcap(family, fields, "attn_logit_softcapping", facts.attn_softcap, facts.attn_softcap is not None),
    )
    turned = _rotated(facts, fields, num_layers)
    return [
        replace(plain, window=window if kind == SLIDING else None, rope=ropes[kind] if turned[index] else None)
        for index, kind in enumerate(kinds)
    ]


def softcap(family: Family, fields: Fields, name: str, default: float | None, capped: bool) -> float | None:
    """A soft cap: null means none, an absent field the default of the class.

    BadValue for a number where the family is not ``capped``: other programs do not look at the field there, so its
    checkpoints cannot have been trained with it.
    """
    found = fields.maybe_number(name) if name in fields.data else default
    if found is not None and not capped:
        raise BadValue(
            f"{fields.where}: {name} = {found:g}, but a {family.name} caps nothing there and other programs ignore the"
            " field: set it to null to run the model as they do"
        )
    return found


def _kv_heads(family: Family, fields: Fields, num_heads: int) -> int:
    rule = family.cache
    if rule.one_kv_head is not None:
        flag, default, unless = rule.one_kv_head
        if not (unless and fields.flag(unless, default=False)):
            return 1 if fields.flag(flag, default=default) else num_heads
    return fields.maybe_integer(*rule.kv_heads, high=2**16) or num_heads


def check_groups(where: str, num_heads: int, num_kv_heads: int) -> None:
    """BadValue unless the query heads divide evenly over the kv heads."""
    if num_heads % num_kv_heads:
        raise BadValue(
            f"{where}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads};"
            " every kv head must serve the same number of query heads"
        )


def _kinds(family: Family, facts: DecoderFacts, fields: Fields, num_layers: int) -> list[str]:
    """The attention kind of each layer, as the planner reads it: ``full_attention`` or ``sliding_attention``."""
    pattern = family.cache.pattern
    off = isinstance(pattern, Windowed) and fields.get("sliding_window") in (None, 0)
    gate = pattern.gate if isinstance(pattern, Windowed) else None
    if facts.windows and (off or (gate is not None and not fields.flag(gate, default=False))):
        return [FULL] * num_layers
    words = fields.maybe_list("layer_types", length=num_layers)
    allowed = (FULL, SLIDING) if facts.windows else (FULL,)
    for index, word in enumerate(words or []):
        if word not in allowed:
            raise BadValue(f"{fields.where}: layer_types[{index}] = {word!r}; allowed are {', '.join(allowed)}")
    return [SLIDING if kind == "swa" else FULL for kind in layer_kinds(family.cache, fields, num_layers)]


def _rotated(facts: DecoderFacts, fields: Fields, num_layers: int) -> list[bool]:
    """Which layers rotate: a list with 1 for those that do, or every one but the last of each step."""
    if facts.no_rope_step is None:
        return [True] * num_layers
    listed = fields.maybe_list("no_rope_layers", length=num_layers)
    if listed is not None:
        return [bool(fields.as_integer(f"no_rope_layers[{i}]", value, 0, 1)) for i, value in enumerate(listed)]
    step = fields.maybe_integer("no_rope_layer_interval", high=10_000) or facts.no_rope_step
    return [(index + 1) % step != 0 for index in range(num_layers)]
