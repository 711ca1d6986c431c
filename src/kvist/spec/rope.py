"""Inverse frequencies of rotary embeddings. Pure Python; every step is rounded to float32 as checkpoints expect."""

from __future__ import annotations

import math
import struct

from kvist.base.errors import BadValue
from kvist.spec.model import LinearScaling, Llama3Scaling, Rope

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
    raise BadValue(f"rope scaling {rope.scaling!r} has no rule")


def attention_factor(rope: Rope) -> float:
    """What cos and sin are multiplied by: 1 for every scaling known here (yarn and longrope would differ)."""
    del rope
    return 1.0


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
