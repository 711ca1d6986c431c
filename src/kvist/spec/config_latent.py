"""Multi-head latent attention of a config.json: ranks, head widths, and the softmax scale with YaRN's factor in it."""

from __future__ import annotations

import math

from kvist.base.errors import BadValue
from kvist.spec.config_feeds import is_set
from kvist.spec.config_rope import FULL, rope_of
from kvist.spec.facts import DecoderFacts, LatentFacts
from kvist.spec.model import LatentAttention
from kvist.spec.read import Fields
from kvist.spec.rope import score_factor

_WIDTH = 2**14


def latent_attention(
    facts: DecoderFacts, latent: LatentFacts, fields: Fields, num_heads: int, hidden: int
) -> LatentAttention:
    """The latent attention that all layers of a config have. MissingField, WrongType or BadValue with the field.

    Heads of keys and ``head_dim`` say nothing here, and published configs disagree about them: they are not read.
    ``q_lora_rank`` must be there, a number or null: absent, nobody can know.
    """
    if "q_lora_rank" not in fields.data and fields.defaults.get("q_lora_rank") is None:
        raise fields.missing("q_lora_rank", why="null where queries are projected in one step")
    nope = fields.integer("qk_nope_head_dim", high=_WIDTH)
    rotary = fields.integer("qk_rope_head_dim", high=_WIDTH)
    value = fields.maybe_integer("v_head_dim", high=_WIDTH)
    if value is None:
        if hidden % num_heads:
            raise fields.missing("v_head_dim", why=f"{hidden} channels do not divide into {num_heads} heads")
        value = hidden // num_heads
    rope = rope_of(facts, fields, FULL, rotary)
    if rope.rotary_dim != rotary:
        raise BadValue(f"{fields.where}: qk_rope_head_dim = {rotary} channels rotate all or not at all")
    return LatentAttention(
        num_heads=num_heads,
        q_lora_rank=fields.maybe_integer("q_lora_rank", high=2**16),
        kv_lora_rank=fields.integer("kv_lora_rank", high=2**16),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotary,
        v_head_dim=value,
        scale=score_factor(rope) / math.sqrt(nope + rotary),
        rope=rope,
        bias=is_set(fields, facts.out_bias),
        interleaved=is_set(fields, latent.interleaved),
    )
