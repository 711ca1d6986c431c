"""A whole decoder in float64, judged from outside: no cache, no kernels, no batching, own rotation and own mask.

Written from the published architectures (Llama; Gemma 2 and 3: norms around both branches, normalised queries and keys,
sliding layers; OLMo 2: norms behind the branches only; Granite: multipliers; GPT-2 and its like: layer norms, learned
positions, no gate; GPT-NeoX and Falcon: parallel branches; DeepSeek: latents, expanded here, and experts), on one token
list at a time. Everything that the engine
shares between its paths is done differently here, so that one bug cannot sit on both sides of a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvist.base.errors import VerifyError
from kvist.spec.model import Attention, LatentAttention, LayerSpec, MixtureOfExperts, ModelSpec, Norm
from kvist.verify.judge_experts import Route, experts
from kvist.verify.judge_latent import latent_attention
from kvist.verify.judge_parts import Weights, feed_forward, normalise, rotation_angles, stretch, turn

HEAD_ROWS = 1 << 24  # elements of the head that are converted to float64 at once: 128 MB


def judge_logits(
    spec: ModelSpec,
    weights: Weights,
    tokens: Sequence[int],
    positions: Sequence[int] | None = None,
    routes: Mapping[int, Route] | None = None,
) -> Tensor:
    """Logits float64 [T, vocab] of ``tokens``; only at ``positions`` when given (a vocabulary is large).

    ``routes``: by layer, the experts that a run under test chose; see ``judge_experts.experts``.

    Raises VerifyError for an empty list, a token outside the vocabulary, or a layer kind that has no judge.
    """
    bad = [token for token in tokens if not 0 <= token < spec.vocab_size]
    if not tokens or bad:
        raise VerifyError(f"{len(tokens)} tokens, of which {bad[:5]} lie outside a vocabulary of {spec.vocab_size}")
    x = judge_hidden(spec, weights, tokens, routes=routes)
    if positions is not None:
        x = x[list(positions)]
    head = weights("embed" if spec.tied_embeddings else "head")
    count = max(1, HEAD_ROWS // spec.hidden_size)
    logits = torch.cat([x @ head[row : row + count].double().T for row in range(0, len(head), count)], -1)
    logits = logits * spec.logit_scale
    return logits if spec.logit_softcap is None else spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)


def judge_hidden(
    spec: ModelSpec,
    weights: Weights,
    tokens: Sequence[int],
    observe: Callable[[int, Tensor], None] | None = None,
    routes: Mapping[int, Route] | None = None,
) -> Tensor:
    """The final normalised states float64 [T, hidden]; ``observe(layer, x)`` is shown the stream behind each layer."""
    x = weights("embed")[torch.tensor(tokens)].double() * spec.embedding_scale
    if spec.learned_positions is not None:
        x = x + weights("positions")[: len(tokens)].double()
    for index, layer in enumerate(spec.layers):

        def layer_weights(role: str, index: int = index) -> Tensor:
            return weights(f"layers.{index}.{role}").double()

        x = _layer(layer, layer_weights, x, (routes or {}).get(index))
        if observe is not None:
            observe(index, x)
    return normalise(x, weights, "final_norm", spec.norm)


def _layer(layer: LayerSpec, weights: Weights, x: Tensor, route: Route | None) -> Tensor:
    """One layer on the stream x [T, hidden]."""
    norm = layer.norm
    before_ffn = "input_norm" if layer.shared_norm else "pre_ffn_norm"

    def read(role: str, stream: Tensor) -> Tensor:
        return normalise(stream, weights, role, norm) if layer.pre_norms else stream

    def join(role: str, branch: Tensor) -> Tensor:
        return layer.residual_scale * (normalise(branch, weights, role, norm) if layer.post_norms else branch)

    seen = read("input_norm", x)
    match layer.attention:
        case LatentAttention() as latent:
            mixed = latent_attention(latent, weights, seen)
        case Attention() as attention:
            mixed = _attention(attention, norm, weights, seen)
        case other:
            raise VerifyError(f"layers of kind {type(other).__name__} have no judge yet")
    attended = x + join("post_attention_norm", mixed)
    fed = read(before_ffn, x if layer.parallel else attended)
    feed = layer.feed_forward
    if isinstance(feed, MixtureOfExperts):
        return attended + join("post_ffn_norm", experts(feed, weights, fed, route))
    return attended + join("post_ffn_norm", feed_forward(feed, weights, fed))


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
        q, k = normalise(q, weights, "q_norm", norm), normalise(k, weights, "k_norm", norm)
        q, k = q.view(length, attention.num_heads, -1), k.view(length, attention.num_kv_heads, -1)
    if attention.rope is not None:
        angles, longer = rotation_angles(attention.rope, length), stretch(attention.rope)
        q, k = turn(q, angles, longer), turn(k, angles, longer)
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
