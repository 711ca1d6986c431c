"""B14: positions inside a prefill chunk are the request's own, whatever the chunk size and the neighbours."""

from __future__ import annotations

import pytest

from reading_decoder import World, greedy

# Ids that the decoder never generates, so that prompt tokens are known by their value.
PROMPTS = [[101, 102, 103], [201, 202, 203, 204, 205, 206, 207, 208]]


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 8, 999_999])
@pytest.mark.parametrize("window", [None, 4])
def test_every_chunk_size_equals_one_shot(chunk: int, window: int | None) -> None:
    world = World((window,), max_tokens=chunk, max_num_seqs=min(2, chunk))
    assert world.run(*PROMPTS, max_tokens=5) == [greedy(prompt, 5, (window,)) for prompt in PROMPTS]
    fed = [
        (token, position)
        for step in world.decoder.steps
        for token, position in zip(step.tokens.tolist(), step.positions.tolist(), strict=True)
        if token > 100
    ]
    assert sorted(fed) == [(token, position) for prompt in PROMPTS for position, token in enumerate(prompt)]
