"""The judge's router on scores that can be checked by eye, and when it follows another choice than its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvist.base.errors import VerifyError
from kvist.spec.model import MixtureOfExperts
from kvist.verify.judge_experts import Route, chosen, experts, gates

PLAIN = MixtureOfExperts(6, 2, 4, "silu")
NONE = [0.0] * 6
SCORES = [0.1, 0.5, 0.3, 0.5, 0.2, 0.4]


def test_the_best_in_order_and_ties_to_the_lower_number() -> None:
    assert chosen(PLAIN, SCORES, NONE) == [1, 3]
    assert chosen(replace(PLAIN, top_k=4), SCORES, NONE) == [1, 3, 5, 2]


def test_a_bias_counts_for_the_choice_and_not_for_the_gate() -> None:
    bias = [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    picked = chosen(PLAIN, SCORES, bias)
    assert picked == [0, 1]
    assert gates(PLAIN, SCORES, picked) == [0.1, 0.5]
    assert gates(replace(PLAIN, normalise=True, scale=2.0), SCORES, picked) == pytest.approx([2 / 6, 10 / 6])


def test_groups_by_their_best_and_by_the_sum_of_their_two_best() -> None:
    grouped = replace(PLAIN, groups=3, top_groups=1)
    scores = [0.9, 0.0, 0.6, 0.5, 0.2, 0.1]
    assert chosen(grouped, scores, NONE) == [0, 1]  # 0.9 is the best of all
    assert chosen(replace(grouped, group_score="top2"), scores, NONE) == [2, 3]  # 0.6 + 0.5 beats 0.9 + 0


def branch(mixture: MixtureOfExperts, logits: list[float], ids: list[int] | None, margin: float = 0.01) -> Tensor:
    """The branch of one token whose router gives ``logits``; each expert answers with its own number at full gate."""

    def weights(role: str) -> Tensor:
        if role == "router":
            return torch.tensor(logits, dtype=torch.float64)[:, None]
        _, number, part = role.split(".")
        return torch.full((1, 1), 20.0 if part == "gate" else float(number) + 1, dtype=torch.float64)

    run = None if ids is None else Route(torch.tensor([ids]), margin)
    return experts(mixture, weights, torch.ones(1, 1, dtype=torch.float64), run)


def test_a_choice_that_rounding_explains_is_followed_and_no_other() -> None:
    mixture = replace(PLAIN, scoring="sigmoid", top_k=1, intermediate_size=1)
    logits = [0.0, 2.0, 1.999, -2.0, -2.0, -2.0]
    own = branch(mixture, logits, None)
    assert torch.equal(branch(mixture, logits, [1]), own)
    followed = branch(mixture, logits, [2])
    assert float(followed) / float(own) == pytest.approx(
        9 / 4, rel=1e-3
    )  # expert 2 says 20 x 3 x 3, expert 1 20 x 2 x 2
    assert torch.equal(branch(mixture, logits, [2], margin=1e-6), own)
    for wrong in ([0], [3], [7], [-1]):
        assert torch.equal(branch(mixture, logits, wrong), own), wrong
    pair = replace(mixture, top_k=2)
    assert torch.equal(branch(pair, logits, [2, 2]), branch(pair, logits, None))


def test_an_expert_of_a_closed_group_is_not_followed() -> None:
    mixture = replace(
        PLAIN, scoring="sigmoid", top_k=2, intermediate_size=1, groups=3, top_groups=1, group_score="top2"
    )
    logits = [3.0, -3.0, 1.0, 0.999, 0.0, 0.0]
    own = branch(mixture, logits, None)
    assert torch.equal(branch(mixture, logits, [2, 3]), own)
    assert torch.equal(branch(mixture, logits, [0, 3]), own)
    close = [1.0, 1.0, 1.0, 0.999, 0.0, 0.0]  # groups that are worth alike
    assert not torch.equal(branch(mixture, close, [2, 3]), branch(mixture, close, None))


def test_scores_that_have_no_judge() -> None:
    with pytest.raises(VerifyError, match="'tanh' have no judge"):
        branch(replace(PLAIN, scoring="tanh", intermediate_size=1), [0.0] * 6, None)
