"""B12: in a batch of unequal rows each keeps its own positions, and nothing is padded into the cache."""

from __future__ import annotations

import pytest

from reading_decoder import World, greedy

EOS = 2


@pytest.mark.parametrize("window", [None, 4])
def test_short_rows_equal_their_solo_runs(window: int | None) -> None:
    # Id 2 would be the padding (and end) token elsewhere: as part of a prompt it is a token like any other.
    prompts = [[EOS, 5], [3, EOS, EOS, 4, 1, 9], [EOS]]
    world = World((window,), eos=[EOS], max_tokens=32)
    requests = [world.submit(prompt, 5, ignore_eos=True) for prompt in prompts]
    world.engine.step()
    step = world.decoder.steps[0]
    assert step.positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 0]
    assert step.tokens.tolist() == [token for prompt in prompts for token in prompt]
    # What the rows left behind: each its own tokens and no padding.
    assert [table.written for table in world.engine.tables] == [2, 6, 1]
    world.drain()
    assert [request.generated for request in requests] == [greedy(prompt, 5, (window,)) for prompt in prompts]
