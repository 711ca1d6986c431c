"""B16: after any ending, the ids of a request and what is stored of them differ by a number that the request tells."""

from __future__ import annotations

import pytest

from kvist.engine.request import FinishReason
from reading_decoder import World, greedy

PROMPT = [1, 2, 3]
USER = [30, 31]


def end_by(world: World, ending: str) -> tuple[list[int], int]:
    """Generate 5 tokens and end in the given way: the ids, and how many the request says are stored."""
    request = world.submit(PROMPT, 5 if ending == "length" else 50)
    while not request.finished:
        world.engine.step()
        if len(request.generated) == 5 and ending in ("stop string", "abort"):
            reason = FinishReason.STOP if ending == "stop string" else FinishReason.ABORT
            assert world.engine.tables[0].written == request.written
            assert world.engine.abort(request.id, reason)
    assert request.finish_reason is {"length": FinishReason.LENGTH, "abort": FinishReason.ABORT}.get(
        ending, FinishReason.STOP
    )
    ids = [*PROMPT, *request.generated]
    assert request.length == len(ids) == len(PROMPT) + 5
    assert list(request.unwritten) == ids[request.written :]
    return ids, request.written


@pytest.mark.parametrize("ending", ["eos", "stop string", "length", "abort"])
def test_history_and_store_differ_by_what_the_request_says(ending: str) -> None:
    expected = greedy(PROMPT, 5)
    assert expected[4] not in expected[:4]
    world = World(eos=[expected[4]] if ending == "eos" else [])
    ids, written = end_by(world, ending)
    put_through = [token for step in world.decoder.steps for token in step.tokens.tolist()]
    # The sampled last token, an end token too, is in the ids and not in the cache.
    assert ids[3:] == expected
    assert put_through == ids[:written] == ids[:-1]
    world.check()
    assert world.free == [64]
    # The second turn feeds everything again, the last token included, and answers as a cold run does.
    turn = [*ids, *USER]
    assert world.run(turn, max_tokens=4, ignore_eos=True) == [greedy(turn, 4)]
    # Leaving the last token out, as the bug did, would have answered otherwise.
    assert greedy([*ids[:-1], *USER], 4) != greedy(turn, 4)


def test_without_a_cache_nothing_is_stored() -> None:
    world = World(cache=False)
    request = world.submit(PROMPT, 5)
    world.drain()
    assert request.written == 0
    assert list(request.unwritten) == [*PROMPT, *greedy(PROMPT, 5)]


def test_an_abort_between_prefill_chunks_says_how_far_it_came() -> None:
    world = World(max_tokens=4, max_num_seqs=1)
    request = world.submit(range(10), 5)
    world.engine.step()
    world.engine.step()
    world.engine.abort(request.id)
    assert request.written == 8
    assert request.unwritten == (8, 9)


def test_an_abort_while_queued_stored_nothing() -> None:
    world = World()
    request = world.submit(range(10), 5)
    world.engine.abort(request.id)
    assert request.written == 0
    assert request.finish_reason is FinishReason.ABORT
