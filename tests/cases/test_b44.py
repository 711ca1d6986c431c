"""B44: a request that can never fit is refused at once with the numbers, and blocks nobody."""

from __future__ import annotations

import pytest

from kvist.base.errors import TooLong
from kvist.engine.request import FinishReason
from reading_decoder import World, greedy


def small() -> World:
    """Four usable blocks of 4: 16 places. A context larger than the pool, so that the pool is the limit."""
    return World(num_blocks=4, block_size=4, ctx_size=64, max_tokens=32)


def test_oversize_is_refused_and_the_ones_behind_it_run() -> None:
    world = small()
    with pytest.raises(TooLong, match=r"prompt has 17 tokens, the pool's blocks hold 16"):
        world.submit(range(17))
    with pytest.raises(TooLong, match=r"prompt has 20 tokens"):
        world.submit(range(20))
    assert world.run([1, 2, 3], [4, 5, 6]) == [greedy([1, 2, 3], 5), greedy([4, 5, 6], 5)]


def test_real_sizes() -> None:
    world = World(num_blocks=12, block_size=8192, ctx_size=106_496, max_tokens=8192)
    with pytest.raises(TooLong, match=r"prompt has 100000 tokens, the pool's blocks hold 98304 .*ctx_size 106496"):
        world.submit([1] * 100_000)
    assert world.run([1], [2]) == [greedy([1], 5), greedy([2], 5)]


@pytest.mark.parametrize("prompt", [15, 16])
def test_a_prompt_that_just_fits_gets_what_room_there_is(prompt: int) -> None:
    """The last sampled token is never stored: 16 places give a prompt of 16 one token, a prompt of 15 two."""
    world = small()
    request, behind = world.submit(range(prompt), 5), world.submit([1, 2, 3], 2)
    world.drain()
    assert request.generated == greedy(range(prompt), 17 - prompt)
    assert request.finish_reason is FinishReason.LENGTH
    assert behind.generated == greedy([1, 2, 3], 2)


def test_a_growing_request_ends_with_length_at_capacity() -> None:
    world = small()
    request = world.submit(range(10), 100)
    world.drain()
    assert request.generated == greedy(range(10), 7)
    assert request.finish_reason is FinishReason.LENGTH
    assert request.written == 16


def test_while_someone_waits_the_plan_says_for_what() -> None:
    world = small()
    world.submit(range(9), 8)
    waiting = world.submit(range(6), 3)
    world.engine.step()
    reason = world.engine.scheduler.plan().waiting
    assert reason == f"request {waiting.id} needs 2 blocks of group 0, 0 are not promised to others"
    world.drain()
    assert waiting.generated == greedy(range(6), 3)
