"""What the judge's layers are made of, in float64: rotation, norms, the dense feed forward. Nothing of the engine's."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvist.base.errors import VerifyError
from kvist.spec.model import FeedForward, LinearScaling, Llama3Scaling, LongRope, Norm, Rope, Yarn

# Gives a tensor of any floating type by canonical name (kvist.spec.names): "embed", "layers.3.q", "layers.3.q.bias".
Weights = Callable[[str], Tensor]


def rotation_angles(rope: Rope, length: int) -> Tensor:
    """Angles float64 [length, rotary_dim / 2] of positions 0..length, in radians."""
    frequencies = [rope.theta ** (-2 * pair / rope.rotary_dim) for pair in range(rope.rotary_dim // 2)]
    if rope.divisors is not None:
        frequencies = [f / divisor for f, divisor in zip(frequencies, rope.divisors, strict=True)]
    elif isinstance(rope.scaling, LinearScaling):
        frequencies = [f / rope.scaling.factor for f in frequencies]
    elif isinstance(rope.scaling, Llama3Scaling):
        frequencies = [_llama3_frequency(f, rope.scaling) for f in frequencies]
    elif isinstance(rope.scaling, LongRope):
        factors = {"short": rope.scaling.short, "long": rope.scaling.long}[str(rope.scaling.chosen)]
        frequencies = [f / factor for f, factor in zip(frequencies, factors, strict=True)]
    elif isinstance(rope.scaling, Yarn):
        frequencies = [_yarn_frequency(rope, pair, f, rope.scaling) for pair, f in enumerate(frequencies)]
    return torch.outer(torch.arange(length, dtype=torch.float64), torch.tensor(frequencies, dtype=torch.float64))


def stretch(rope: Rope) -> float:
    """What cos and sin are multiplied by."""
    scaling = rope.scaling
    if isinstance(scaling, LongRope):
        return scaling.attention_factor
    if not isinstance(scaling, Yarn):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return temperature(scaling.factor, 1.0)
    return temperature(scaling.factor, scaling.mscale) / temperature(scaling.factor, scaling.mscale_all_dim)


def temperature(factor: float, weight: float) -> float:
    """YaRN's temperature of scores: it grows with the logarithm of how far a context was stretched."""
    return 1.0 + weight * math.log(max(1.0, factor)) / 10


def _yarn_frequency(rope: Rope, pair: int, frequency: float, scaling: Yarn) -> float:
    """Between kept and divided: by where a pair lies between the last fast one and the first slow one."""

    def pair_that_turns(times: float) -> float:
        wanted = 2 * math.pi * times / scaling.original_max_position
        return -math.log(wanted) / math.log(rope.theta) * rope.rotary_dim / 2

    fast, slow = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        fast, slow = float(math.floor(fast)), float(math.ceil(slow))
    fast, slow = max(fast, 0.0), min(slow, rope.rotary_dim - 1.0)
    divided = min(1.0, max(0.0, (pair - fast) / (slow - fast if slow != fast else 0.001)))
    return frequency * (1 - divided) + frequency / scaling.factor * divided


def _llama3_frequency(frequency: float, scaling: Llama3Scaling) -> float:
    """Interpolate between kept and divided by how many turns fit into the original context."""
    turns = scaling.original_max_position * frequency / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = min(1.0, max(0.0, kept))
    return frequency * (kept + (1 - kept) / scaling.factor)


def turn(x: Tensor, angles: Tensor, stretch: float) -> Tensor:
    """Rotate channel pairs (i, i + rotary/2) of x [T, heads, D] as complex numbers, and stretch them."""
    half = angles.shape[1]
    lengths = torch.full_like(angles, stretch)
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(lengths, angles)[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


def normalise(x: Tensor, weights: Weights, role: str, norm: Norm) -> Tensor:
    """RMS norm or layer norm over the last axis, with the weights of ``role``."""
    weight = norm.offset + weights(role).double()
    if norm.kind == "layer":
        y = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + norm.eps) * weight
    elif norm.kind == "rms":
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + norm.eps) * weight
    else:
        raise VerifyError(f"norm {norm.kind!r} has no judge: known are rms and layer")
    return y + weights(f"{role}.bias").double() if norm.bias else y


def feed_forward(ffn: FeedForward, weights: Weights, x: Tensor, prefix: str = "") -> Tensor:
    """down(act(gate) * up), or down(act(up)) without a gate; ``prefix`` stands before the names of its tensors."""

    def project(role: str, y: Tensor) -> Tensor:
        y = y @ weights(prefix + role).T
        return y + weights(f"{prefix}{role}.bias") if ffn.bias else y

    gate = project("gate" if ffn.gated else "up", x)
    if ffn.activation == "silu":
        gate = gate / (1 + torch.exp(-gate))
    elif ffn.activation == "gelu_tanh":
        gate = gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    elif ffn.activation == "gelu":
        gate = gate / 2 * (1 + torch.erf(gate / math.sqrt(2)))
    else:
        raise VerifyError(f"activation {ffn.activation!r} has no judge: known are silu, gelu_tanh and gelu")
    return project("down", gate * project("up", x) if ffn.gated else gate)
