"""The one place where lists become arrays: a StepPlan and the block tables turn into the arrays of one step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from kvist.cache.table import GONE, Table
from kvist.engine.request import Request
from kvist.engine.scheduler import StepPlan
from kvist.kernels.ops import Step


def build(plan: StepPlan, requests: Mapping[int, Request], tables: Mapping[int, Table]) -> Step:
    """The arrays of ``plan``, requests in its order; nothing is padded but the unused ends of short block tables.

    ``tables`` must reach every position of the plan (extended before); ``rows`` are the last tokens of those chunks
    whose next token is wanted, in plan order.
    """
    total = plan.num_tokens
    tokens = np.empty(total, np.int32)
    positions = np.empty(total, np.int32)
    starts = np.zeros(len(plan.chunks) + 1, np.int32)
    rows = []
    end = 0
    for b, chunk in enumerate(plan.chunks):
        begin, end = end, end + chunk.stop - chunk.start
        tokens[begin:end] = requests[chunk.request_id].ids(chunk.start, chunk.stop)
        positions[begin:end] = np.arange(chunk.start, chunk.stop)
        starts[b + 1] = end
        if chunk.sample:
            rows.append(end - 1)
    owners = [tables[chunk.request_id] for chunk in plan.chunks]
    return Step(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        starts=torch.from_numpy(starts),
        tables=tuple(torch.from_numpy(_block_table(owners, group.index)) for group in owners[0].groups),
        rows=torch.from_numpy(np.array(rows, np.int32)),
    )


def _block_table(owners: list[Table], group: int) -> NDArray[np.int32]:
    """Block ids [B, M] of one group, -1 where nothing is stored (any more)."""
    entries = [owner.entries(group) for owner in owners]
    block_table = np.full((len(entries), max(map(len, entries))), GONE, np.int32)
    for row, blocks in zip(block_table, entries, strict=True):
        row[: len(blocks)] = blocks
    return block_table
