"""B55: what a step was given stays as it was, and concurrent requests never touch each other."""

from __future__ import annotations

import torch

from reading_decoder import World, greedy

PROMPTS = [[i % 12, 5, 6, 7, 8 + i % 12, *range(i % 12)] for i in range(16)]  # 12 different ones, four twice


def test_sixteen_streams_equal_their_sequential_runs_while_half_are_cancelled() -> None:
    for windows in ((None,), (None, 5)):
        world = World(windows, num_blocks=200, max_tokens=24, max_num_seqs=16)
        requests = [world.submit(prompt, 12) for prompt in PROMPTS]
        for step in range(8):
            world.engine.step()
            if step >= 4:
                world.engine.abort(requests[2 * step + 1].id)
                world.engine.abort(requests[2 * (step - 4) + 1].id)
        world.drain()
        for i, (prompt, request) in enumerate(zip(PROMPTS, requests, strict=True)):
            expected = greedy(prompt, 12, windows)
            if i % 2:
                assert request.generated == expected[: len(request.generated)]
                assert len(request.generated) < 12
            else:
                assert request.generated == expected


def test_the_arrays_of_a_step_do_not_move_when_the_engine_goes_on() -> None:
    world = World((None, 5), max_tokens=8, max_num_seqs=4)
    for prompt in PROMPTS[:4]:
        world.submit(prompt, 6)
    world.engine.step()
    step = world.decoder.steps[0]
    parts = (step.tokens, step.positions, step.starts, step.rows, *step.tables)
    copies = [part.clone() for part in parts]
    world.drain()
    assert len(world.decoder.steps) > 3
    assert all(torch.equal(part, copy) for part, copy in zip(parts, copies, strict=True))
