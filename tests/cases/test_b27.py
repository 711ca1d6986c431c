"""B27: every send of a prompt computes at least one token and answers as if cold, at and around block borders."""

from __future__ import annotations

import pytest

from reading_decoder import World, greedy


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_the_same_prompt_three_times(length: int) -> None:
    world = World()
    prompt = list(range(10, 10 + length))
    for _ in range(3):
        before = world.engine.metrics.projections
        assert world.run(prompt, max_tokens=3) == [greedy(prompt, 3)]
        assert world.engine.metrics.projections > before


def test_a_proper_prefix_of_an_earlier_prompt_answers_as_if_cold() -> None:
    world = World()
    prompt = list(range(8))
    world.run(prompt)
    for length in (5, 4):
        assert world.run(prompt[:length]) == [greedy(prompt[:length], 5)]
    assert all(len(step.tokens) > 0 for step in world.decoder.steps)
