"""Requests that begin like others start with their rows: same answers, fewer projections, no block lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvist.base.errors import CacheError
from reading_decoder import World

PROMPT = [1 + i % 7 for i in range(42)]
SIZE = 4  # of a World's blocks


def keeping(**settings: int) -> World:
    world = World(**settings)
    world.engine.settings = replace(world.engine.settings, keep=True)
    return world


def answer(world: World, prompt: list[int], tokens: int = 5) -> tuple[list[int], int]:
    request = world.submit(prompt, tokens)
    world.drain()
    return request.generated, request.cached_tokens


def cold(prompt: list[int], tokens: int = 5) -> list[int]:
    return answer(World(), prompt, tokens)[0]


def test_a_request_begins_with_what_a_finished_one_left() -> None:
    world = keeping()
    assert answer(world, PROMPT) == (cold(PROMPT), 0)
    longer = [*PROMPT, 8, 9]
    assert answer(world, longer) == (cold(longer), 40)
    assert world.engine.metrics.cached_tokens == 40
    world.engine.forget()
    assert world.free == [pool.num_blocks for pool in world.pools]


def test_at_least_one_token_is_computed() -> None:
    """B27: the whole prompt is stored, but the logits of its last token are not."""
    for length in (1, 3, 4, 5, 7, 8, 9):
        world = keeping()
        hits = [answer(world, PROMPT[:length]) for _ in range(3)]
        assert [tokens for tokens, _ in hits] == [cold(PROMPT[:length])] * 3
        assert [hit for _, hit in hits] == [0, *[(length - 1) // SIZE * SIZE] * 2]


def test_a_shorter_prompt_answers_as_if_cold() -> None:
    """B27: a prompt that is a beginning of a stored one."""
    world = keeping()
    answer(world, PROMPT[:8])
    assert answer(world, PROMPT[:5]) == (cold(PROMPT[:5]), 4)
    assert answer(world, PROMPT[:4]) == (cold(PROMPT[:4]), 0)


def test_running_requests_share_and_leave_in_any_order() -> None:
    world = keeping()
    first = world.submit(PROMPT, 30)
    while first.written < len(PROMPT):
        world.engine.step()
    others = [world.submit([*PROMPT, tail], 6) for tail in (2, 3)]
    world.engine.step()
    assert [other.cached_tokens for other in others] == [40, 40]
    world.engine.abort(first.id)
    world.drain()
    assert [other.generated for other in others] == [cold([*PROMPT, tail], 6) for tail in (2, 3)]


def test_kept_requests_make_room_for_those_that_run() -> None:
    world = keeping(num_blocks=14)
    for start in range(6):
        prompt = [(start + i) % 9 + 1 for i in range(45)]
        assert answer(world, prompt)[0] == cold(prompt)


def test_windows_share_only_what_is_still_stored() -> None:
    world = World(windows=(None, 6))
    world.engine.settings = replace(world.engine.settings, keep=True)
    plain = World(windows=(None, 6))
    answer(world, PROMPT, 1)
    for prompt in ([*PROMPT[:20], 9, 9], [*PROMPT, 8]):
        assert answer(world, prompt)[0] == answer(plain, prompt)[0]


def test_a_shared_block_is_never_written_again() -> None:
    world = keeping()
    answer(world, PROMPT)
    request = world.submit(PROMPT, 5)
    world.engine.step()
    table = world.engine.tables[0]
    assert request.cached_tokens == 40
    with pytest.raises(CacheError, match="shares"):
        table.truncate(18)
    table.truncate(16)
    world.check()


def test_a_table_begins_only_with_whole_stored_blocks_of_another() -> None:
    world = keeping()
    answer(world, PROMPT)
    request = world.submit(PROMPT, 5)
    world.engine.step()
    assert request.cached_tokens == 40
    table = world.engine.tables[0]
    assert table.shareable(10) == 8
    assert table.shareable(10_000) == 40
    with pytest.raises(CacheError, match="cannot begin"):
        table.begin_with(table, 8)
