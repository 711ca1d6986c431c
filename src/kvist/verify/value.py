"""Native against the float64 judge: the row by value that no shared mistake can pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvist.base.dtypes import FLOAT32
from kvist.kernels.ops import NormWeight, Weight
from kvist.model.buffers import first_width, key_width
from kvist.model.weights import LatentWeights, LayerWeights, inner_width
from kvist.spec.model import LatentAttention, LayerSpec, MixtureOfExperts
from kvist.verify.compare import (
    CHOICE,
    CHOICE_ROUNDED,
    KL_BFLOAT16,
    KL_PACKED,
    KL_PACKED_PRODUCTS,
    LOGITS,
    kl_divergence,
    relative_error,
)
from kvist.verify.course import Course, Subject
from kvist.verify.judge import judge_logits
from kvist.verify.judge_experts import Route
from kvist.verify.report import FirstDifference, LawRow


def held_weights(subject: Subject) -> Callable[[str], Tensor]:
    """The subject's own tensors by canonical name, as float32: what was loaded, not what the file says."""
    spec, weights = subject.spec, subject.weights

    def get(name: str) -> Tensor:
        if name in ("embed", "head"):
            return _rows(weights.embed if name == "embed" else weights.head)
        if name == "positions":
            assert weights.positions is not None
            return _rows(weights.positions)
        if name == "final_norm":
            return weights.final_norm.weight - spec.norm.offset
        if name == "final_norm.bias":
            assert weights.final_norm.bias is not None
            return weights.final_norm.bias
        _, index, role = name.split(".", 2)
        return held_in_layer(spec.layers[int(index)], weights.layers[int(index)], role)

    return get


def held_in_layer(spec: LayerSpec, layer: LayerWeights, role: str) -> Tensor:
    """One tensor of a layer by its role as float32; ``q.bias`` is the bias of ``q``."""
    role, _, rest = role.partition(".")
    if role == "experts" and layer.experts is not None and isinstance(spec.feed_forward, MixtureOfExperts):
        number, part = rest.split(".")
        if part == "down":
            return _rows(layer.experts.down[int(number)])
        width = spec.feed_forward.intermediate_size
        return _rows(layer.experts.gate_up[int(number)], *((0, width) if part == "gate" else (width, 2 * width)))
    if role in ("router", "router_bias") and layer.experts is not None:
        return _rows(layer.experts.router) if role == "router" else layer.experts.bias  # type: ignore[return-value]
    if role in ("q_b", "kv_b") and layer.latent is not None:
        return _rows(layer.latent.q_b) if role == "q_b" else _expansion(layer.latent)
    ends = _places(spec)
    role = {"q_a_norm": "q_norm", "kv_a_norm": "k_norm"}.get(role, role).removeprefix("shared_")
    fused = {"gate": "gate_up", "up": "gate_up"}.get(role, "qkv" if role in ends else role)
    held = getattr(layer, fused)
    if isinstance(held, NormWeight):
        of_latent = isinstance(spec.attention, LatentAttention) and role in ("q_norm", "k_norm")
        found = held.bias if rest else held.weight - (0.0 if of_latent else spec.norm.offset)
        assert found is not None
        return found
    if rest:
        bias: Tensor = getattr(layer, f"{fused}_bias")
        return bias[slice(*ends[role])] if role in ends else bias
    return _rows(held, *ends.get(role, (0, held.n)))


def _places(spec: LayerSpec) -> dict[str, tuple[int, int]]:
    """(first, last) row of each tensor that is held one below the other."""
    a, feed = spec.attention, spec.feed_forward
    if isinstance(a, LatentAttention):
        kv = first_width(a) - key_width(a)
        ends = {"q": (0, kv), "q_a": (0, kv), "kv_a": (kv, first_width(a))}
    else:
        q, k = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        ends = {"q": (0, q), "k": (q, q + k), "v": (q + k, first_width(a))}
    ffn, gated = inner_width(feed)
    return ends | {"gate": (0, ffn), "up": (ffn, 2 * ffn) if gated else (0, ffn)}


def _expansion(latent: LatentWeights) -> Tensor:
    """kv_b [H * (nope + Dv), C], put together again from the heads' halves."""
    pairs = zip(latent.w_uk, latent.w_uv, strict=True)
    return torch.cat([part for key, value in pairs for part in (_rows(key).T, _rows(value))])


def _rows(weight: Weight | None, start: int = 0, stop: int | None = None) -> Tensor:
    assert weight is not None
    return weight.rows(torch.arange(start, weight.n if stop is None else stop))


def check_value(subject: Subject, tokens: Sequence[int], positions: Sequence[int]) -> LawRow:
    """Logits at ``positions`` against float64: relative norm for float32, mean KL where anything is rounded."""
    course = Course(subject, length=len(tokens), step_tokens=len(tokens))
    course.watched = {}
    lane = course.lane(tokens)
    rows: dict[int, Tensor] = {}
    for start in range(0, len(tokens), 50):  # through the cache, in pieces
        n = min(50, len(tokens) - start)
        course.feed([(lane, n)], keep=False)
        wanted = [p for p in positions if start <= p < start + n]
        if wanted:
            rows |= dict(zip(wanted, course.rows(n, [p - start for p in wanted]), strict=True))
    actual = torch.stack([rows[p] for p in positions])
    law = "by value"
    rounded = subject.kv_dtype != FLOAT32
    exact = not (subject.weights.packed or subject.weights.dtype != FLOAT32 or rounded)
    margin = CHOICE if exact else CHOICE_ROUNDED
    routes = {layer: Route(torch.cat(parts), margin) for layer, parts in course.watched.items()}
    expected = judge_logits(subject.spec, held_weights(subject), tokens, positions, routes)
    if not bool(torch.isfinite(actual).all()):
        position = positions[int((~torch.isfinite(actual)).any(-1).nonzero()[0])]
        broken = int((~torch.isfinite(actual)).sum())
        where = FirstDifference(position, None, "by value", float("nan"), broken)
        return LawRow(law, "float64 judge", len(positions), False, where, "logits are not finite")
    if not exact:
        divergence = kl_divergence(actual, expected)
        packed = KL_PACKED if rounded else KL_PACKED_PRODUCTS
        allowed = packed if subject.weights.packed else KL_BFLOAT16
        ok, detail = divergence <= allowed, f"mean KL {divergence:.2e} nats to float64, {allowed:.0e} allowed"
    else:
        error = relative_error(actual, expected)
        ok, detail = error <= LOGITS, f"relative error {error:.1e} to float64, {LOGITS:.0e} allowed"
    difference: FirstDifference | None = None
    if not ok:
        apart = (actual.double() - expected).abs().amax(-1)
        worst = int(apart.argmax())
        difference = FirstDifference(positions[worst], None, "by value", float(apart[worst]), actual.shape[1])
    return LawRow(law, "float64 judge", len(positions), ok, difference, detail)
