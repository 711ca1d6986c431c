"""B47: every way to end gives every block back, once."""

from __future__ import annotations

import pytest

from kvist.engine.request import FinishReason
from reading_decoder import World, greedy


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("windows", [(None,), (None, 6)], ids=str)
def test_two_hundred_requests_of_every_ending(block_size: int, windows: tuple[int | None, ...]) -> None:
    world = World(windows, block_size=block_size, num_blocks=24, max_tokens=8, max_num_seqs=4, eos=[0, 1, 2, 3, 4])
    start = world.free
    reasons = set()
    for wave in range(25):
        requests = [world.submit(range(wave % 7, wave % 7 + 1 + (3 * i) % 13), 6) for i in range(8)]
        world.engine.abort(requests[7].id)  # while queued
        for step in range(12):
            world.engine.step()
            if step == 0:
                world.engine.abort(requests[1].id)  # between its chunks, or in its decode
            if step == 3:
                world.engine.abort(requests[4].id)
                world.engine.abort(requests[4].id)
            world.check()
        world.drain()
        assert world.free == start
        assert world.engine.scheduler.promised == (0,) * len(windows)
        reasons |= {request.finish_reason for request in requests}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    assert sum(world.engine.metrics.finished.values()) == 200
    assert world.run([1, 2, 3], max_tokens=6, ignore_eos=True) == [greedy([1, 2, 3], 6, windows)]


def test_aborting_twice_or_an_unknown_id_does_nothing() -> None:
    world = World()
    request = world.submit([1, 2, 3])
    world.engine.step()
    assert world.engine.abort(request.id)
    free = world.free
    assert not world.engine.abort(request.id)
    assert not world.engine.abort(12345)
    assert world.free == free == [64]
    assert request.finish_reason is FinishReason.ABORT
