"""The rotary embedding of a config.json: per-kind or plain ``rope_parameters``, or the older loose fields."""

from __future__ import annotations

import math

from kvist.base.errors import BadValue
from kvist.spec.facts import DecoderFacts
from kvist.spec.model import LinearScaling, Llama3Scaling, LongRope, Rope, RopeScaling, Yarn
from kvist.spec.read import Fields

FULL, SLIDING = "full_attention", "sliding_attention"
_SCALINGS = ("default", "linear", "llama3", "longrope", "yarn")
_FACTOR = ("partial_rotary_factor", "rotary_pct")


def rope_of(facts: DecoderFacts, fields: Fields, kind: str, head_dim: int) -> Rope:
    """The rotary embedding of layers of ``kind`` (``full_attention`` or ``sliding_attention``)."""
    local = kind == SLIDING and facts.local_rope_theta is not None
    settings = fields.maybe_group("rope_parameters")
    if settings is not None and facts.local_rope_theta is not None and settings.present(FULL, SLIDING):
        settings = settings.maybe_group(kind)
    elif settings is None and not local:
        settings = fields.maybe_group("rope_scaling")
    elif local:
        settings = None  # The window's base has its own field, and is never scaled.
    settings = settings or Fields({}, fields.where)
    theta = settings.maybe_number("rope_theta")
    if theta is None:
        theta = fields.maybe_number(*(("rope_local_base_freq",) if local else ("rope_theta", "rotary_emb_base")))
    if theta is None:
        theta = facts.local_rope_theta if local else facts.rope_theta
    assert theta is not None
    factor = settings.maybe_number(*_FACTOR, high=1.0) or fields.maybe_number(*_FACTOR, high=1.0)
    rotary_dim = int(head_dim * (factor or facts.rotary_factor))
    if rotary_dim < 2 or rotary_dim % 2:
        raise BadValue(
            f"{fields.where}: {rotary_dim} rotary channels (of head_dim {head_dim}); an even number is needed"
        )
    return Rope(theta, rotary_dim, _scaling(settings, fields, rotary_dim))


def _scaling(settings: Fields, fields: Fields, rotary_dim: int) -> RopeScaling | None:
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
            return Llama3Scaling(settings.number("factor", high=1e6), low, high, _original(settings, fields))
        case "yarn":
            return _yarn(settings, fields)
        case "longrope" | "su":
            return _longrope(settings, fields, rotary_dim)
        case _:
            raise BadValue(
                f"{settings.where}: rope scaling {kind!r} is not supported; supported are {', '.join(_SCALINGS)}"
            )


def _original(settings: Fields, fields: Fields) -> int:
    return settings.maybe_integer("original_max_position_embeddings") or fields.integer(
        "original_max_position_embeddings", "max_position_embeddings"
    )


def _yarn(settings: Fields, fields: Fields) -> Yarn:
    fast = settings.maybe_number("beta_fast", high=1e6)
    slow = settings.maybe_number("beta_slow", high=1e6)
    # A zero switches a factor off, as an absent field does.
    names = ("mscale", "mscale_all_dim")
    mscale, all_dim = (settings.maybe_number(n, high=1e3) if settings.get(n) != 0 else None for n in names)
    if (mscale is None) != (all_dim is None) and mscale != 1.0:
        raise BadValue(
            f"{settings.where}: mscale = {mscale} and mscale_all_dim = {all_dim}: implementations disagree about one "
            "of them without the other; give both or none"
        )
    return Yarn(
        factor=settings.number("factor", high=1e6),
        original_max_position=_original(settings, fields),
        beta_fast=32.0 if fast is None else fast,
        beta_slow=1.0 if slow is None else slow,
        mscale=mscale,
        mscale_all_dim=all_dim,
        attention_factor=settings.maybe_number("attention_factor", high=1e3),
        truncate=settings.flag("truncate", default=True),
    )


def _longrope(settings: Fields, fields: Fields, rotary_dim: int) -> LongRope:
    original = settings.maybe_integer("original_max_position_embeddings") or fields.integer(
        "original_max_position_embeddings"
    )
    factor = settings.maybe_number("factor", high=1e6)
    if factor is None:
        factor = fields.integer("max_position_embeddings") / original
    stretch = settings.maybe_number("attention_factor", high=1e3)
    if stretch is None:
        stretch = long_stretch(factor, original)
    lists = [_factors(settings, name, rotary_dim // 2) for name in ("short_factor", "long_factor")]
    return LongRope(lists[0], lists[1], original, stretch)


def long_stretch(factor: float, original: int) -> float:
    """What LongRoPE multiplies cos and sin by when the model does not say."""
    return 1.0 if factor <= 1.0 or original <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _factors(settings: Fields, name: str, count: int) -> tuple[float, ...]:
    listed = settings.maybe_list(name)
    if listed is None:
        raise settings.missing(name, why="LongRoPE has a factor for each channel pair")
    if len(listed) != count:
        raise BadValue(f"{settings.where}: {name} has {len(listed)} factors, but there are {count} channel pairs")
    for index, value in enumerate(listed):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise BadValue(f"{settings.where}: {name}[{index}] = {value!r} must be a number above 0")
    return tuple(float(value) for value in listed)
