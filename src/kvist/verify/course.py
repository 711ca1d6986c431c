"""Requests fed through a decoder on a chosen path, with what it answers at every position kept as digests.

A course owns a poisoned pool and a decoder over the subject's weights. What varies between courses (block size,
threads, ring or pages, who else is in the batch, how tokens are cut into steps) is what the laws say must not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import xxhash
from torch import Tensor

from kvist.base.dtypes import DType
from kvist.base.errors import NotResident
from kvist.cache.addressing import Ring
from kvist.cache.layout import Group, groups_of
from kvist.cache.pool import Pool
from kvist.cache.sizing import blocks_for
from kvist.cache.table import GONE, Table
from kvist.kernels.blockformat import read_k, read_v
from kvist.kernels.ops import Append, AppendLatent, Backend, Op, Route, Step
from kvist.model.decoder import Decoder
from kvist.model.weights import ModelWeights
from kvist.spec.model import ModelSpec

HEAD_ROWS = 32  # rows of logits that are held at once


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A loaded model under test. ``threads(n)`` gives its backend with n threads over the same weights."""

    name: str
    spec: ModelSpec
    weights: ModelWeights
    kv_dtype: DType
    threads: Callable[[int | None], Backend]


@dataclass(slots=True, eq=False)
class Lane:
    """One request: its tokens, its table, and the digest of the logits behind each position that was computed."""

    tokens: list[int]
    table: Table
    digests: dict[int, bytes] = field(default_factory=dict)
    dropped: int = 0  # blocks given back because they left a window


@dataclass(frozen=True, slots=True)
class Tap:
    """Where to look: the rows that every operation leaves for one position of one lane."""

    lane: int
    position: int


class Course:
    """A pool and a decoder of their own, and the lanes that are fed through them."""

    def __init__(
        self,
        subject: Subject,
        *,
        length: int,
        lanes: int = 1,
        block_size: int = 64,
        step_tokens: int = 512,
        threads: int | None = None,
        spec: ModelSpec | None = None,
        ring_chunk: int | None = None,
        tap: Tap | None = None,
    ) -> None:
        """Room for ``lanes`` requests of ``length`` tokens, fed at most ``step_tokens`` at a time.

        ``ring_chunk``: window layers keep their rows in rings with room for steps of that many tokens.
        """
        self.subject, self.spec = subject, spec or subject.spec
        groups = groups_of(self.spec, subject.kv_dtype, block_size, ring_chunk)
        if ring_chunk is not None:
            groups = tuple(_as_ring(group, ring_chunk) for group in groups)
        self.groups = groups
        self.pool = Pool(groups, blocks_for(groups, length, step_tokens, lanes), poison=True)
        self.backend = subject.threads(threads)
        self.decoder = Decoder(
            self.spec,
            subject.weights,
            self.backend,
            self.pool,
            max_positions=length,
            max_tokens=step_tokens,
            max_rows=HEAD_ROWS,
        )
        self.lanes: list[Lane] = []
        self.steps = 0
        self.largest_batch = 0
        self.tap = tap
        self.seen: list[tuple[str, Tensor]] = []  # what the tap saw: operation by operation, the last time
        self.watched: dict[int, list[Tensor]] | None = None  # experts chosen in each layer, step by step, when a dict

    def lane(self, tokens: Sequence[int]) -> Lane:
        """A new, empty request over ``tokens``."""
        lane = Lane(list(tokens), Table(self.groups, self.pool.blocks))
        self.lanes.append(lane)
        return lane

    def feed(self, parts: Sequence[tuple[Lane, int]], *, keep: bool = True) -> None:
        """One step: the next ``n`` tokens of each lane, in this order. ``keep``: digest the logits of every row."""
        for lane, n in parts:
            lane.table.extend(n)
        step = self._step(parts)
        self.steps += 1
        self.largest_batch = max(self.largest_batch, len(parts))
        taken = self._tapped(parts)
        if self.watched is not None:
            self._watch(step, self.watched)
        elif taken is None:
            self.decoder.body.run(step)
        else:
            self.seen = self._trace(step, *taken)
        if keep:
            self._digest(step, parts)
        for lane, n in parts:
            lane.table.commit(n)
            lane.dropped += lane.table.give_back()

    def rows(self, tokens: int, wanted: Sequence[int]) -> Tensor:
        """Logits [R, vocab] of rows ``wanted`` of the last step, which had ``tokens`` tokens."""
        empty = torch.zeros(tokens, dtype=torch.int32)
        step = Step(
            empty, empty, torch.tensor([0, tokens], dtype=torch.int32), (), torch.tensor(wanted, dtype=torch.int32)
        )
        return self.decoder.logits(step).clone()

    def run(self, lane: Lane, stop: int, chunk: int, *, keep: bool = True) -> None:
        """Feed ``lane`` alone up to position ``stop``, ``chunk`` tokens a step."""
        while lane.table.written < stop:
            self.feed([(lane, min(chunk, stop - lane.table.written))], keep=keep)

    def back_to(self, lane: Lane, length: int, chunk: int) -> None:
        """Forget everything from ``length`` on; where a window has dropped what is needed, recompute from the start."""
        try:
            lane.table.truncate(length)
        except NotResident:
            lane.table.truncate(0)
            self.run(lane, length, chunk, keep=False)

    def _step(self, parts: Sequence[tuple[Lane, int]]) -> Step:
        tokens: list[int] = []
        positions: list[int] = []
        starts = [0]
        for lane, n in parts:
            first = lane.table.written
            tokens += lane.tokens[first : first + n]
            positions += range(first, first + n)
            starts.append(len(tokens))
        tables = []
        for group in self.groups:
            entries = [lane.table.entries(group.index) for lane, _ in parts]
            width = max(len(row) for row in entries)
            tables.append(torch.tensor([[*row, *[GONE] * (width - len(row))] for row in entries], dtype=torch.int32))
        return Step(
            torch.tensor(tokens, dtype=torch.int32),
            torch.tensor(positions, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            tuple(tables),
            torch.arange(len(tokens), dtype=torch.int32),
        )

    def _digest(self, step: Step, parts: Sequence[tuple[Lane, int]]) -> None:
        owners = [(lane, lane.table.written + i) for lane, n in parts for i in range(n)]
        for start in range(0, len(owners), HEAD_ROWS):
            rows = step.rows[start : start + HEAD_ROWS]
            logits = self.decoder.logits(replace(step, rows=rows)).numpy()
            for row, (lane, position) in zip(logits, owners[start : start + HEAD_ROWS], strict=True):
                lane.digests[position] = xxhash.xxh3_128_digest(row.tobytes())

    def _tapped(self, parts: Sequence[tuple[Lane, int]]) -> tuple[int, int] | None:
        """(row in the step, request in the step) of the tapped position; None when this step does not compute it."""
        if self.tap is None:
            return None
        row = 0
        for b, (lane, n) in enumerate(parts):
            offset = self.tap.position - lane.table.written
            if lane is self.lanes[self.tap.lane] and 0 <= offset < n:
                return row + offset, b
            row += n
        return None

    def _watch(self, step: Step, watched: dict[int, list[Tensor]]) -> None:
        """Run ``step``, stopping behind every route to note what it chose."""
        first = 0
        for i, op in enumerate(self.decoder.body.ops):
            if isinstance(op, Route):
                self.decoder.body.run_range(step, first, i + 1)
                watched.setdefault(int(op.name.split()[1]), []).append(op.ids[: len(step.tokens)].clone())
                first = i + 1
        self.decoder.body.run_range(step, first, len(self.decoder.body.ops))

    def _trace(self, step: Step, row: int, request: int) -> list[tuple[str, Tensor]]:
        """Run operation by operation; after each, the row that it left for the tapped position."""
        seen = []
        position = int(step.positions[row])
        for i, op in enumerate(self.decoder.body.ops):
            self.decoder.body.run_range(step, i, i + 1)
            seen.append((op.name, _left(op, step, row, request, position)))
        logits = self.decoder.logits(replace(step, rows=torch.tensor([row], dtype=torch.int32)))
        seen.append(("head", logits[0].clone()))
        return seen


def _left(op: Op, step: Step, row: int, request: int, position: int) -> Tensor:
    """What ``op`` left for one row of the step.

    Its output; for an append the rotated query and the stored K and V; for a route the experts and their gates.
    """
    if isinstance(op, Route):
        return torch.cat([op.ids[row].double(), op.gates[row].double()])
    if not isinstance(op, Append | AppendLatent):
        return op.out[row].clone()
    table = step.tables[op.store.group][request]
    k = read_k(op.store, table, position, position + 1)
    v = read_v(op.store, table, position, position + 1)
    return torch.cat([op.q_out[row].flatten().double(), k.flatten().double(), v.flatten().double()])


def _as_ring(group: Group, chunk: int) -> Group:
    if group.window is None or group.ring is not None:
        return group
    ring = Ring(group.window, 0, group.block_size, chunk)
    return replace(group, layout=replace(group.layout, addressing=ring))
