"""B59: generation ends at the context, with reason ``length``, whatever was asked; parallel requests wait for room."""

from __future__ import annotations

import pytest

from kvist.base.errors import TooLong
from kvist.engine.request import FinishReason
from reading_decoder import World, greedy


def world(blocks: int = 32) -> World:
    return World(num_blocks=blocks, block_size=16, ctx_size=512, max_tokens=256)


@pytest.mark.parametrize("max_tokens", [None, 32_768])
@pytest.mark.parametrize("prompt", [1, 511, 512])
def test_a_model_that_never_stops_ends_at_the_context(prompt: int, max_tokens: int | None) -> None:
    one = world()
    request = one.submit([3] * prompt, max_tokens)
    one.drain(limit=600)
    assert request.finish_reason is FinishReason.LENGTH
    assert len(request.generated) == 513 - prompt  # 512 are stored; the last one is only sampled
    assert request.written == 512
    assert max(int(step.positions.max()) for step in one.decoder.steps) == 511


@pytest.mark.parametrize("prompt", [513, 5000])
def test_a_longer_prompt_is_refused_with_both_numbers(prompt: int) -> None:
    with pytest.raises(TooLong, match=f"prompt has {prompt} tokens, the context holds 512"):
        world().submit([3] * prompt)


def test_four_in_a_context_for_one_take_turns() -> None:
    one = World(num_blocks=8, block_size=16, ctx_size=128, max_tokens=256)
    prompts = [[i + 1, 7] for i in range(4)]
    assert one.run(*prompts, max_tokens=128) == [greedy(prompt, 127) for prompt in prompts]
    assert len(one.decoder.steps) == 4 * 127
