"""Native against the float64 judge: the row by value that no shared mistake can pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvist.base.dtypes import FLOAT32
from kvist.kernels.ops import NormWeight, Weight
from kvist.spec.model import Attention
from kvist.verify.compare import KL_BFLOAT16, KL_PACKED, KL_PACKED_PRODUCTS, LOGITS, kl_divergence, relative_error
from kvist.verify.course import Course, Subject
from kvist.verify.judge import judge_logits
from kvist.verify.report import FirstDifference, LawRow


def held_weights(subject: Subject) -> Callable[[str], Tensor]:
    """The subject's own tensors by canonical name, as float32: what was loaded, not what the file says."""
    spec, weights = subject.spec, subject.weights

    def part(weight: Weight, start: int, stop: int) -> Tensor:
        return weight.rows(torch.arange(start, stop))

    def get(name: str) -> Tensor:
        if name in ("embed", "head"):
            weight = weights.embed if name == "embed" else weights.head
            return part(weight, 0, weight.n)
        if name == "positions":
            assert weights.positions is not None
            return part(weights.positions, 0, weights.positions.n)
        if name == "final_norm":
            return weights.final_norm.weight - spec.norm.offset
        if name == "final_norm.bias":
            assert weights.final_norm.bias is not None
            return weights.final_norm.bias
        _, index, role, *rest = name.split(".")
        layer, layer_spec = weights.layers[int(index)], spec.layers[int(index)]
        a = layer_spec.attention
        assert isinstance(a, Attention)
        q, k = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        ends = {"q": (0, q), "k": (q, q + k), "v": (q + k, q + k + a.num_kv_heads * a.v_head_dim)}
        ffn = layer_spec.feed_forward.intermediate_size
        ends |= {"gate": (0, ffn), "up": (ffn, 2 * ffn) if layer_spec.feed_forward.gated else (0, ffn)}
        fused = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}.get(role, role)
        held = getattr(layer, fused)
        if isinstance(held, NormWeight):
            assert not rest or held.bias is not None
            return held.bias if rest and held.bias is not None else held.weight - layer_spec.norm.offset
        if rest:  # a bias
            bias: Tensor = getattr(layer, f"{fused}_bias")
            return bias[slice(*ends[role])] if role in ends else bias
        start, stop = ends.get(role, (0, held.n))
        return part(held, start, stop)

    return get


def check_value(subject: Subject, tokens: Sequence[int], positions: Sequence[int]) -> LawRow:
    """Logits at ``positions`` against float64: relative norm for float32, mean KL where anything is rounded."""
    expected = judge_logits(subject.spec, held_weights(subject), tokens, positions)
    course = Course(subject, length=len(tokens), step_tokens=len(tokens))
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
    if not bool(torch.isfinite(actual).all()):
        position = positions[int((~torch.isfinite(actual)).any(-1).nonzero()[0])]
        broken = int((~torch.isfinite(actual)).sum())
        where = FirstDifference(position, None, "by value", float("nan"), broken)
        return LawRow(law, "float64 judge", len(positions), False, where, "logits are not finite")
    rounded = subject.kv_dtype != FLOAT32
    if subject.weights.packed or subject.weights.dtype != FLOAT32 or rounded:
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
