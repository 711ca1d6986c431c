"""A mixture of experts judged from outside: one token after the other, by lists and sorting."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.base.errors import VerifyError
from kvist.spec.model import FeedForward, MixtureOfExperts
from kvist.verify.judge_parts import Weights, feed_forward


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """What a run chose in one layer: ids [T, k], and how far apart its scores may lie, as a share of their spread."""

    ids: Tensor
    margin: float


def experts(mixture: MixtureOfExperts, weights: Weights, x: Tensor, run: Route | None = None) -> Tensor:
    """The branch of x float64 [T, hidden], normalised already: [T, hidden].

    ``run``: what was chosen by the run under test. A choice is a step function: where two experts score nearly alike,
    a stream that is rounded somewhere takes the other one, and no bound on values can say that this is right. Such a
    choice is followed, but only where the scores here lie as close as the rounding can have moved them.
    """
    logits = x @ weights("router").T
    bias = weights("router_bias").tolist() if mixture.correction_bias else [0.0] * mixture.num_experts
    customers: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for token, row in enumerate(logits):
        scores = _scores(mixture, row).tolist()
        picked = chosen(mixture, scores, bias)
        if run is not None:
            seen = [int(expert) for expert in run.ids[token]]
            if set(seen) != set(picked) and _near(mixture, scores, bias, picked, seen, run.margin):
                picked = seen
        for expert, gate in zip(picked, gates(mixture, scores, picked), strict=True):
            customers[expert].append((token, gate))
    out = torch.zeros_like(x)
    gated = FeedForward(mixture.intermediate_size, mixture.activation)
    for expert, visits in customers.items():
        tokens = [token for token, _ in visits]
        weight = torch.tensor([gate for _, gate in visits], dtype=x.dtype)[:, None]
        out[tokens] += weight * feed_forward(gated, weights, x[tokens], f"experts.{expert}.")
    if mixture.shared_size:
        out = out + feed_forward(FeedForward(mixture.shared_size, mixture.activation), weights, x, "shared_")
    return out


def chosen(mixture: MixtureOfExperts, scores: list[float], bias: list[float]) -> list[int]:
    """The experts of one token, best first; ties go to the lower number."""
    wanted = [score + extra for score, extra in zip(scores, bias, strict=True)]
    groups = _groups(mixture)
    open_groups = sorted(groups, key=lambda group: _worth(mixture, wanted, group), reverse=True)[: mixture.top_groups]
    eligible = sorted(expert for group in open_groups for expert in group)
    return sorted(eligible, key=lambda expert: wanted[expert], reverse=True)[: mixture.top_k]


def gates(mixture: MixtureOfExperts, scores: list[float], picked: list[int]) -> list[float]:
    """What each of the ``picked`` experts counts for."""
    total = sum(scores[expert] for expert in picked) if mixture.normalise else 1.0
    return [scores[expert] / total * mixture.scale for expert in picked]


def _groups(mixture: MixtureOfExperts) -> list[range]:
    size = mixture.num_experts // mixture.groups
    return [range(first, first + size) for first in range(0, mixture.num_experts, size)]


def _worth(mixture: MixtureOfExperts, wanted: list[float], group: range) -> float:
    best = sorted((wanted[expert] for expert in group), reverse=True)
    return best[0] + best[1] if mixture.group_score == "top2" else best[0]


def _near(
    mixture: MixtureOfExperts, scores: list[float], bias: list[float], picked: list[int], seen: list[int], margin: float
) -> bool:
    """Whether ``seen`` is ``picked`` but for experts, or groups of them, that score alike within ``margin``."""
    if len(set(seen)) != len(picked) or not all(0 <= expert < mixture.num_experts for expert in seen):
        return False
    wanted = [score + extra for score, extra in zip(scores, bias, strict=True)]
    allowed = margin * (max(wanted) - min(wanted))
    worths = {group: _worth(mixture, wanted, group) for group in _groups(mixture)}
    taken = {group for group in worths if any(expert in group for expert in seen)}
    worst_open = sorted(worths.values(), reverse=True)[mixture.top_groups - 1]
    if len(taken) > mixture.top_groups or any(worths[group] < worst_open - 2 * allowed for group in taken):
        return False
    open_groups = sorted(worths, key=lambda group: (group in taken, worths[group]), reverse=True)[: mixture.top_groups]
    ranked = sorted((wanted[expert] for group in open_groups for expert in group), reverse=True)
    return min(wanted[expert] for expert in seen) >= ranked[mixture.top_k - 1] - allowed


def _scores(mixture: MixtureOfExperts, logits: Tensor) -> Tensor:
    if mixture.scoring == "softmax":
        powers = torch.exp(logits - logits.max())
        return powers / powers.sum()
    if mixture.scoring == "sigmoid":
        return 1 / (1 + torch.exp(-logits))
    raise VerifyError(f"experts scored by {mixture.scoring!r} have no judge: known are softmax and sigmoid")
