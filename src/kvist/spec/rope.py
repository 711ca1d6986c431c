"""Inverse frequencies of rotary embeddings. Pure Python; every step is rounded to float32 as checkpoints expect."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

from kvist.base.errors import BadValue
from kvist.spec.model import LinearScaling, Llama3Scaling, LongRope, ModelSpec, Rope, Yarn

_FLOAT32 = struct.Struct("<f")


def round_float32(value: float) -> float:
    """``value`` rounded to the nearest float32."""
    return float(_FLOAT32.unpack(_FLOAT32.pack(value))[0])


def inverse_frequencies(rope: Rope) -> tuple[float, ...]:
    """Angle per position of each channel pair, rotary_dim / 2 float32 values.

    Channel i turns with channel i + rotary_dim / 2 (half-split pairs). Raises BadValue for a wrong number of divisors.
    """
    half = rope.rotary_dim // 2
    plain = [_inverse(rope.theta, 2 * i, rope.rotary_dim) for i in range(half)]
    if rope.divisors is not None:
        if len(rope.divisors) != half:
            raise BadValue(f"rope has {half} channel pairs, but {len(rope.divisors)} frequency divisors are given")
        return tuple(round_float32(f / d) for f, d in zip(plain, rope.divisors, strict=True))
    match rope.scaling:
        case None:
            return tuple(plain)
        case LinearScaling(factor):
            return tuple(round_float32(f / factor) for f in plain)
        case Llama3Scaling() as scaling:
            return tuple(_llama3(f, scaling) for f in plain)
        case LongRope() as scaling:
            return _longrope(rope, scaling)
        case Yarn() as scaling:
            return _yarn(rope, scaling)
    raise BadValue(f"rope scaling {rope.scaling!r} has no rule")


def attention_factor(rope: Rope) -> float:
    """What cos and sin are multiplied by: 1, or what LongRoPE or YaRN say."""
    match rope.scaling:
        case LongRope(attention_factor=factor):
            return factor
        case Yarn(attention_factor=float(factor)):
            return factor
        case Yarn(factor, mscale=float(mscale), mscale_all_dim=float(all_dim)):
            return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
        case Yarn(factor):
            return yarn_mscale(factor, 1.0)
    return 1.0


def score_factor(rope: Rope | None) -> float:
    """What a DeepSeek softmax scale is multiplied by: the square of YaRN's factor by ``mscale_all_dim``, else 1."""
    if rope is None or not isinstance(rope.scaling, Yarn) or rope.scaling.mscale_all_dim is None:
        return 1.0
    return yarn_mscale(rope.scaling.factor, rope.scaling.mscale_all_dim) ** 2


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's temperature, 0.1 m ln(factor) + 1, of a context stretched by ``factor``."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def fix_context(spec: ModelSpec, ctx_size: int) -> ModelSpec:
    """``spec`` with every LongRoPE list chosen by the context that the cache is made for, and a note that says so.

    The choice holds for every position and every request, however short: what is stored never depends on what comes.
    """
    fixed: dict[Rope, Rope] = {}
    layers = []
    for layer in spec.layers:
        attention = layer.attention
        rope = attention.rope
        if rope is not None and isinstance(rope.scaling, LongRope):
            if rope not in fixed:
                chosen = "long" if ctx_size > rope.scaling.original_max_position else "short"
                fixed[rope] = replace(rope, scaling=replace(rope.scaling, chosen=chosen))
            layer = replace(layer, attention=replace(attention, rope=fixed[rope]))
        layers.append(layer)
    notes = tuple(
        f"LongRoPE: the {rope.scaling.chosen} factors, fixed by a context of {ctx_size} tokens"
        f" (the model's first range is {rope.scaling.original_max_position})"
        for rope in fixed.values()
        if isinstance(rope.scaling, LongRope)
    )
    return replace(spec, layers=tuple(layers), notes=(*spec.notes, *notes)) if fixed else spec


def _longrope(rope: Rope, scaling: LongRope) -> tuple[float, ...]:
    if scaling.chosen not in ("short", "long"):
        raise BadValue("LongRoPE factors are not chosen: they are fixed from the context size when a model is loaded")
    factors = scaling.long if scaling.chosen == "long" else scaling.short
    if len(factors) != rope.rotary_dim // 2:
        raise BadValue(f"rope has {rope.rotary_dim // 2} channel pairs, but {len(factors)} LongRoPE factors are given")
    powers = [round_float32(math.pow(rope.theta, round_float32(2 * i / rope.rotary_dim))) for i in range(len(factors))]
    return tuple(round_float32(1.0 / round_float32(round_float32(f) * p)) for f, p in zip(factors, powers, strict=True))


def _inverse(theta: float, channel: int, rotary_dim: int) -> float:
    exponent = round_float32(channel / rotary_dim)
    return round_float32(1.0 / round_float32(math.pow(theta, exponent)))


def _llama3(frequency: float, scaling: Llama3Scaling) -> float:
    """Short wavelengths stay, long ones are divided, and a ramp joins the two."""
    wavelength = round_float32(2 * math.pi / frequency)
    if wavelength < scaling.original_max_position / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_max_position / scaling.low_freq_factor:
        return round_float32(frequency / scaling.factor)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    turns = round_float32(scaling.original_max_position / wavelength)
    smooth = round_float32(round_float32(turns - scaling.low_freq_factor) / span)
    slow = round_float32(round_float32(round_float32(1 - smooth) * frequency) / scaling.factor)
    return round_float32(slow + round_float32(smooth * frequency))


def _yarn(rope: Rope, scaling: Yarn) -> tuple[float, ...]:
    """Every pair's frequency lies between its own and the divided one, by a ramp over the pairs."""
    low, high = _ramp(rope, scaling)
    span = round_float32(high - low)
    found = []
    for pair in range(rope.rotary_dim // 2):
        power = round_float32(math.pow(rope.theta, round_float32(2 * pair / rope.rotary_dim)))
        kept, divided = round_float32(1.0 / power), round_float32(1.0 / round_float32(scaling.factor * power))
        share = 1.0 - min(1.0, max(0.0, round_float32(round_float32(pair - low) / span)))
        share = round_float32(share)
        found.append(round_float32(round_float32(divided * round_float32(1.0 - share)) + round_float32(kept * share)))
    return tuple(found)


def _ramp(rope: Rope, scaling: Yarn) -> tuple[float, float]:
    """The pairs at which the ramp begins and ends: where a pair turns beta_fast and beta_slow times."""

    def pair(turns: float) -> float:
        wavelengths = scaling.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    return (low, high + 0.001) if low == high else (low, high)
