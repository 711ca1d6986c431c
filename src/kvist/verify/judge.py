"""A whole decoder in float64, judged from outside: no cache, no kernels, no batching, own rotation and own mask.

Written from the published architectures (Llama; Gemma 2 and 3: norms around both branches, normalised queries and keys,
sliding layers; OLMo 2: norms behind the branches only; Granite: multipliers; GPT-2 and its like: layer norms, learned
positions, no gate; GPT-NeoX and Falcon: parallel branches), on one token list at a time. Everything that the engine
shares between its paths is done differently here, so that one bug cannot sit on both sides of a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvist.base.errors import VerifyError
from kvist.spec.model import (
    Attention,
    FeedForward,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    ModelSpec,
    Norm,
    Rope,
)

# Gives a tensor of any floating type by canonical name (kvist.spec.names): "embed", "layers.3.q", "layers.3.q.bias".
Weights = Callable[[str], Tensor]

HEAD_ROWS = 1 << 24  # elements of the head that are converted to float64 at once: 128 MB


def judge_logits(
    spec: ModelSpec, weights: Weights, tokens: Sequence[int], positions: Sequence[int] | None = None
) -> Tensor:
    """Logits float64 [T, vocab] of ``tokens``; only at ``positions`` when given (a vocabulary is large).

    Raises VerifyError for an empty list, a token outside the vocabulary, or a layer kind that has no judge.
    """
    bad = [token for token in tokens if not 0 <= token < spec.vocab_size]
    if not tokens or bad:
        raise VerifyError(f"{len(tokens)} tokens, of which {bad[:5]} lie outside a vocabulary of {spec.vocab_size}")
    x = judge_hidden(spec, weights, tokens)
    if positions is not None:
        x = x[list(positions)]
    head = weights("embed" if spec.tied_embeddings else "head")
    count = max(1, HEAD_ROWS // spec.hidden_size)
    logits = torch.cat([x @ head[row : row + count].double().T for row in range(0, len(head), count)], -1)
    logits = logits * spec.logit_scale
    return logits if spec.logit_softcap is None else spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)


def judge_hidden(
    spec: ModelSpec, weights: Weights, tokens: Sequence[int], observe: Callable[[int, Tensor], None] | None = None
) -> Tensor:
    """The final normalised states float64 [T, hidden]; ``observe(layer, x)`` is shown the stream behind each layer."""
    x = weights("embed")[torch.tensor(tokens)].double() * spec.embedding_scale
    if spec.learned_positions is not None:
        x = x + weights("positions")[: len(tokens)].double()
    for index, layer in enumerate(spec.layers):

        def layer_weights(role: str, index: int = index) -> Tensor:
            return weights(f"layers.{index}.{role}").double()

        x = _layer(layer, layer_weights, x)
        if observe is not None:
            observe(index, x)
    return _normalise(x, weights, "final_norm", spec.norm)


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
    return torch.outer(torch.arange(length, dtype=torch.float64), torch.tensor(frequencies, dtype=torch.float64))


def _llama3_frequency(frequency: float, scaling: Llama3Scaling) -> float:
    """Interpolate between kept and divided by how many turns fit into the original context."""
    turns = scaling.original_max_position * frequency / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = min(1.0, max(0.0, kept))
    return frequency * (kept + (1 - kept) / scaling.factor)


def _layer(layer: LayerSpec, weights: Weights, x: Tensor) -> Tensor:
    """One layer on the stream x [T, hidden]."""
    if not isinstance(layer.attention, Attention):
        raise VerifyError(f"layers of kind {type(layer.attention).__name__} have no judge yet")
    norm = layer.norm
    before_ffn = "input_norm" if layer.shared_norm else "pre_ffn_norm"

    def read(role: str, stream: Tensor) -> Tensor:
        return _normalise(stream, weights, role, norm) if layer.pre_norms else stream

    def join(role: str, branch: Tensor) -> Tensor:
        return layer.residual_scale * (_normalise(branch, weights, role, norm) if layer.post_norms else branch)

    attended = x + join("post_attention_norm", _attention(layer.attention, norm, weights, read("input_norm", x)))
    fed = read(before_ffn, x if layer.parallel else attended)
    return attended + join("post_ffn_norm", _feed_forward(layer.feed_forward, weights, fed))


def _attention(attention: Attention, norm: Norm, weights: Weights, x: Tensor) -> Tensor:
    """Projections, rotation, one dense masked softmax over [H, T, T], and the output projection."""
    length = len(x)

    def project(role: str, heads: int) -> Tensor:
        y = x @ weights(role).T
        if attention.qkv_bias:
            y = y + weights(f"{role}.bias")
        return y.view(length, heads, -1)

    q, k = project("q", attention.num_heads), project("k", attention.num_kv_heads)
    v = project("v", attention.num_kv_heads)
    if attention.qk_norm:
        if attention.qk_norm_whole:
            q, k = q.flatten(1), k.flatten(1)
        q, k = _normalise(q, weights, "q_norm", norm), _normalise(k, weights, "k_norm", norm)
        q, k = q.view(length, attention.num_heads, -1), k.view(length, attention.num_kv_heads, -1)
    if attention.rope is not None:
        angles = rotation_angles(attention.rope, length)
        scaling = attention.rope.scaling
        stretch = scaling.attention_factor if isinstance(scaling, LongRope) else 1.0
        q, k = _turn(q, angles, stretch), _turn(k, angles, stretch)
    per_group = attention.num_heads // attention.num_kv_heads
    k, v = k.repeat_interleave(per_group, 1), v.repeat_interleave(per_group, 1)
    scores = torch.einsum("thd,jhd->htj", q, k) * attention.scale
    if attention.softcap is not None:
        scores = attention.softcap * torch.tanh(scores / attention.softcap)
    hidden = torch.ones(length, length).triu(1)  # the future
    if attention.window is not None:
        gone = torch.ones(length, length).tril(-attention.window)  # and what fell out of the window
        gone[:, : attention.sinks] = 0  # except the sinks
        hidden = hidden + gone
    scores = scores + torch.zeros(length, length, dtype=torch.float64).masked_fill(hidden > 0, -math.inf)
    mixed = torch.einsum("htj,jhd->thd", torch.softmax(scores, -1), v)
    out = mixed.reshape(length, -1) @ weights("o").T
    return out + weights("o.bias") if attention.out_bias else out


def _turn(x: Tensor, angles: Tensor, stretch: float) -> Tensor:
    """Rotate channel pairs (i, i + rotary/2) of x [T, heads, D] as complex numbers, and stretch them."""
    half = angles.shape[1]
    lengths = torch.full_like(angles, stretch)
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(lengths, angles)[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


def _feed_forward(ffn: FeedForward, weights: Weights, x: Tensor) -> Tensor:
    """down(act(gate) * up), or down(act(up)) without a gate."""

    def project(role: str, y: Tensor) -> Tensor:
        y = y @ weights(role).T
        return y + weights(f"{role}.bias") if ffn.bias else y

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


def _normalise(x: Tensor, weights: Weights, role: str, norm: Norm) -> Tensor:
    """RMS norm or layer norm over the last axis, with the weights of ``role``."""
    weight = norm.offset + weights(role).double()
    if norm.kind == "layer":
        y = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + norm.eps) * weight
    elif norm.kind == "rms":
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + norm.eps) * weight
    else:
        raise VerifyError(f"norm {norm.kind!r} has no judge: known are rms and layer")
    return y + weights(f"{role}.bias").double() if norm.bias else y
