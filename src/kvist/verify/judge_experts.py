"""A mixture of experts judged from outside: one token after the other, by lists and sorting."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from kvist.base.errors import VerifyError
from kvist.spec.model import FeedForward, MixtureOfExperts
from kvist.verify.judge_parts import Weights, feed_forward


def experts(mixture: MixtureOfExperts, weights: Weights, x: Tensor) -> Tensor:
    """The branch of x float64 [T, hidden], normalised already: [T, hidden]."""
    logits = x @ weights("router").T
    bias = weights("router_bias").tolist() if mixture.correction_bias else [0.0] * mixture.num_experts
    customers: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for token, row in enumerate(logits):
        for expert, gate in chosen(mixture, _scores(mixture, row).tolist(), bias):
            customers[expert].append((token, gate))
    out = torch.zeros_like(x)
    gated = FeedForward(mixture.intermediate_size, mixture.activation)
    for expert, visits in customers.items():
        tokens = [token for token, _ in visits]
        gates = torch.tensor([gate for _, gate in visits], dtype=x.dtype)[:, None]
        out[tokens] += gates * feed_forward(gated, weights, x[tokens], f"experts.{expert}.")
    if mixture.shared_size:
        out = out + feed_forward(FeedForward(mixture.shared_size, mixture.activation), weights, x, "shared_")
    return out


def chosen(mixture: MixtureOfExperts, scores: list[float], bias: list[float]) -> list[tuple[int, float]]:
    """(expert, gate) of one token, best first; ties go to the lower number."""
    wanted = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = mixture.num_experts // mixture.groups
    groups = [range(first, first + size) for first in range(0, mixture.num_experts, size)]

    def worth(group: range) -> float:
        best = sorted((wanted[expert] for expert in group), reverse=True)
        return best[0] + best[1] if mixture.group_score == "top2" else best[0]

    open_groups = sorted(groups, key=worth, reverse=True)[: mixture.top_groups]
    eligible = sorted(expert for group in open_groups for expert in group)
    ranked = sorted(eligible, key=lambda expert: wanted[expert], reverse=True)[: mixture.top_k]
    total = sum(scores[expert] for expert in ranked) if mixture.normalise else 1.0
    return [(expert, scores[expert] / total * mixture.scale) for expert in ranked]


def _scores(mixture: MixtureOfExperts, logits: Tensor) -> Tensor:
    if mixture.scoring == "softmax":
        powers = torch.exp(logits - logits.max())
        return powers / powers.sum()
    if mixture.scoring == "sigmoid":
        return 1 / (1 + torch.exp(-logits))
    raise VerifyError(f"experts scored by {mixture.scoring!r} have no judge: known are softmax and sigmoid")
