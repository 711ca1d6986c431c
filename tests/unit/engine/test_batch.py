"""engine/batch: lists become arrays."""

from __future__ import annotations

import torch

from kvist.engine import batch
from kvist.engine.scheduler import Chunk, StepPlan
from reading_decoder import World


def test_arrays_of_a_ragged_step() -> None:
    world = World(windows=(None, 6), num_blocks=8)
    first, second = world.submit([10, 11, 12, 13, 14, 15, 16, 17, 18], 4), world.submit([20, 21], 4)
    world.engine.step()
    plan = StepPlan((Chunk(first.id, 9, 10, True), Chunk(second.id, 0, 2, False), Chunk(second.id, 2, 3, True)))
    tables = world.engine._tables
    for table in tables.values():
        table.extend(1)
    step = batch.build(plan, {r.id: r for r in (first, second)}, tables)
    assert step.tokens.tolist() == [*first.generated, 20, 21, *second.generated]
    assert step.positions.tolist() == [9, 0, 1, 2]
    assert step.starts.tolist() == [0, 1, 3, 4]
    assert step.rows.tolist() == [0, 3]
    # 9 tokens written with a window of 6: position 4 is the first that is needed, so the first block is back.
    assert step.tables[0].tolist() == [[0, 1, 2], [3, -1, -1], [3, -1, -1]]
    assert step.tables[1].tolist() == [[-1, 1, 2], [3, -1, -1], [3, -1, -1]]
    assert {part.dtype for part in (step.tokens, step.positions, step.starts, step.rows, *step.tables)} == {torch.int32}


def test_a_step_that_wants_no_logits_has_no_rows() -> None:
    world = World(max_tokens=4, max_num_seqs=4)
    world.submit(range(1, 9))
    assert world.engine.step() == ()
    assert world.decoder.steps[0].rows.shape == (0,)
