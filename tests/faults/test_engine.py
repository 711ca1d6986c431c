"""Faults of the engine: abort at every step, fail the k-th reservation or forward; nothing leaks, nothing changes."""

from __future__ import annotations

import pytest

from kvist.base.errors import OutOfBlocks
from kvist.engine.request import FinishReason
from reading_decoder import World, greedy

PROMPTS = [[1, 2, 3], list(range(10, 23)), [4, 4, 4, 4, 4, 4]]
WINDOWS = (None, 6)
EXPECTED = [greedy(prompt, 6, WINDOWS) for prompt in PROMPTS]


def start(cache: bool = True) -> World:
    world = World(WINDOWS, num_blocks=16, max_tokens=5, max_num_seqs=3, cache=cache)
    for prompt in PROMPTS:
        world.submit(prompt, 6)
    return world


def steps_of_a_run(cache: bool) -> int:
    world = start(cache)
    world.drain()
    return world.engine.metrics.steps


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("victim", range(len(PROMPTS)))
def test_abort_at_every_step(victim: int, cache: bool) -> None:
    for at in range(steps_of_a_run(cache)):
        world = start(cache)
        requests = list(world.engine._requests.values())
        for _ in range(at):
            world.engine.step()
        aborted = world.engine.abort(requests[victim].id)
        world.drain()
        assert world.free == [16, 16]
        for i, request in enumerate(requests):
            assert request.generated == EXPECTED[i][: len(request.generated)]
            if i != victim or not aborted:
                assert request.generated == EXPECTED[i]
            else:
                assert request.finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("group", [0, 1])
def test_the_kth_reservation_fails_and_the_step_is_tried_again(group: int, cache: bool) -> None:
    failures = 0
    for k in range(1, 500):
        world = start(cache)
        world.pools[group].fail_at = k
        requests = list(world.engine._requests.values())
        failed = False
        for _ in range(200):
            before = [(r.written, list(r.generated)) for r in requests]
            try:
                world.engine.step()
            except OutOfBlocks:
                failed = True
                assert [(r.written, list(r.generated)) for r in requests] == before
            world.check()
        assert world.engine.idle
        assert [request.generated for request in requests] == EXPECTED
        assert world.free == [16, 16]
        failures += failed
        if not failed:
            break
    assert failures == k - 1 > 3


@pytest.mark.parametrize("after", ["retry", "abort one", "abort all"])
def test_the_kth_forward_fails(after: str) -> None:
    for k in range(1, steps_of_a_run(True) + 1):
        world = start()
        world.decoder.fail_at = k
        requests = list(world.engine._requests.values())
        with pytest.raises(RuntimeError, match="planted"):
            world.drain()
        world.check()
        assert world.engine.metrics.steps == k - 1
        for request in requests[: {"retry": 0, "abort one": 1, "abort all": 3}[after]]:
            world.engine.abort(request.id)
        world.drain()
        assert world.free == [16, 16]
        for request, expected in zip(requests, EXPECTED, strict=True):
            if request.finish_reason is FinishReason.ABORT:
                assert request.generated == expected[: len(request.generated)]
            else:
                assert request.generated == expected


def test_a_step_that_fails_again_and_again_takes_no_more_blocks() -> None:
    world = World(num_blocks=3, ctx_size=12, max_tokens=5, max_num_seqs=1)
    request = world.submit(range(9), 4)
    while world.engine.scheduler.num_running + world.engine.scheduler.num_waiting:
        for _ in range(3):
            world.decoder.fail_at = len(world.decoder.steps) + 1
            with pytest.raises(RuntimeError, match="planted"):
                world.engine.step()
            world.check()
        world.decoder.fail_at = 0
        world.engine.step()
    assert request.generated == greedy(range(9), 4)
    assert world.free == [3]
