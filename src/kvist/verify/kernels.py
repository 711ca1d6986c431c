"""Kernels under test: attention problems over real blocks, with everything that may not be read turned into NaN.

A problem is made from a seed: rows of K and V that are known from outside, blocks scattered over a pool in random
order, and poison in every block, slot and lane that no query sees. What a kernel must answer comes from
``plain_attention``, on the rows as they were rounded into the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.base.errors import VerifyError
from kvist.kernels.blockformat import block_elements, write_kv
from kvist.kernels.ops import TILE, Attend, Backend, LayerStore, Step, torch_dtype
from kvist.verify.plain import plain_attention, visible_positions


@dataclass(frozen=True, slots=True)
class Shape:
    """Form of an attention problem. ``requests`` lists (stored positions, queries): the queries are the last positions.

    ``ring`` bounds each request to that many physical positions behind its sinks, used cyclically; both are then
    multiples of the block size.
    """

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int | None = None
    dtype: DType = FLOAT32
    block_size: int = 16
    requests: tuple[tuple[int, int], ...] = ((20, 1),)
    window: int | None = None
    sinks: int = 0
    softcap: float | None = None
    ring: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """An Attend over a filled store, its step, and K and V per request as stored (NaN where no query looks)."""

    op: Attend
    step: Step
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]

    def expected(self) -> Tensor:
        """What the output must be: float64 [T, H * Dv]."""
        heads, width = self.op.num_heads, self.op.store.head_dim
        parts = []
        starts = self.step.starts.tolist()
        for b, (first, last) in enumerate(pairwise(starts)):
            q = self.op.q[first:last].reshape(last - first, heads, width)
            positions = self.step.positions[first:last].tolist()
            mask = (self.op.window, self.op.sinks, self.op.softcap)
            parts.append(plain_attention(q, self.k[b], self.v[b], positions, *mask).flatten(1))
        return torch.cat(parts)

    def run(self, backend: Backend) -> Tensor:
        """The output of ``backend``, in a fresh buffer that was NaN before: [T, H * Dv]."""
        op = replace(self.op, out=torch.full_like(self.op.out, torch.nan))
        backend.compile([op]).run(self.step)
        return op.out


def new_store(shape: Shape, num_blocks: int, group: int = 0) -> LayerStore:
    """A store of ``num_blocks`` blocks, poisoned all over."""
    width = shape.v_head_dim or shape.head_dim
    elements = block_elements(shape.num_kv_heads, shape.head_dim, width, shape.block_size)
    data = torch.full((num_blocks, elements), torch.nan, dtype=torch_dtype(shape.dtype)).view(torch.uint8)
    return LayerStore(data, shape.dtype, shape.block_size, shape.num_kv_heads, shape.head_dim, width, group)


def attention_problem(
    shape: Shape, seed: int = 0, spread: float = 1.0, out_dtype: torch.dtype | None = None
) -> Problem:
    """A random problem of ``shape``. ``spread`` scales the scores: 1 gives flat ones, 8 nearly one-hot probabilities.

    ``out_dtype`` is the type of the output buffer, float32 when None.
    """
    random = torch.Generator().manual_seed(seed)
    tables = _tables(shape, random)
    store = new_store(shape, int(max(int(t.max()) for t in tables)) + 2)
    dtype = torch_dtype(shape.dtype)
    keys, values, queries = [], [], []
    positions: list[int] = []
    for (length, count), table in zip(shape.requests, tables, strict=True):
        if not 0 <= count <= length:
            raise VerifyError(f"{count} queries cannot be the last of {length} positions")
        seen = seen_positions(shape, range(length - count, length))
        k = torch.randn(length, shape.num_kv_heads, store.head_dim, generator=random).to(dtype)
        v = torch.randn(length, shape.num_kv_heads, store.v_head_dim, generator=random).to(dtype)
        at = torch.tensor(seen, dtype=torch.int64)
        write_kv(store, table, at, k[at], v[at])
        unseen = torch.ones(length, dtype=torch.bool)
        unseen[at] = False
        keys.append(k.masked_fill(unseen[:, None, None], torch.nan))
        values.append(v.masked_fill(unseen[:, None, None], torch.nan))
        positions += range(length - count, length)
        q = torch.randn(count, shape.num_heads, store.head_dim, generator=random)
        queries.append(q * (spread * store.head_dim**-0.5))
    starts = torch.tensor([0, *(count for _, count in shape.requests)]).cumsum(0).to(torch.int32)
    q = torch.cat(queries).to(torch.bfloat16 if shape.dtype == BFLOAT16 else torch.float32)
    out = torch.empty(len(q), shape.num_heads * store.v_head_dim, dtype=out_dtype or torch.float32)
    op = Attend("attend", q, out, store, shape.num_heads, shape.window, shape.sinks, shape.softcap)
    step = Step(
        tokens=torch.zeros(len(q), dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        starts=starts,
        tables=(_padded(tables),),
        rows=torch.arange(len(q), dtype=torch.int32),
    )
    return Problem(op, step, tuple(keys), tuple(values))


def seen_positions(shape: Shape, queries: Sequence[int]) -> list[int]:
    """Positions that any of the queries sees, ascending."""
    seen: set[int] = set()
    for position in queries:
        seen.update(visible_positions(position, shape.window, shape.sinks))
    return sorted(seen)


def _tables(shape: Shape, random: torch.Generator) -> list[Tensor]:
    """Per request a table over scattered blocks; -1 where no query sees anything of the block."""
    size = shape.block_size
    if size % TILE or (shape.ring is not None and (shape.ring % size or shape.sinks % size)):
        raise VerifyError(f"block size {size}, ring {shape.ring} and sinks {shape.sinks} do not fit together")
    tables, used = [], 0
    for length, count in shape.requests:
        logical = -(-length // size)
        if shape.ring is None:
            slots = list(range(logical))
        else:
            kept, turn = shape.sinks // size, shape.ring // size
            slots = [i if i < kept else kept + (i - kept) % turn for i in range(logical)]
        seen = seen_positions(shape, range(length - count, length))
        if len({(slots[p // size], p % size) for p in seen}) < len(seen):
            raise VerifyError(
                f"a ring of {shape.ring} positions cannot hold what {count} queries of {length} see at once"
            )
        stored = {p // size for p in seen}
        tables.append(torch.tensor([used + slots[i] if i in stored else -1 for i in range(logical)], dtype=torch.int64))
        used += max(slots, default=-1) + 1
    order = torch.randperm(used + 1, generator=random)  # one more block than needed: nobody may look into it
    return [torch.where(table < 0, -1, order[table.clamp(min=0)]) for table in tables]


def _padded(tables: Sequence[Tensor]) -> Tensor:
    """Tables as one int32 [B, M], padded with -1."""
    rows = torch.full((len(tables), max(len(table) for table in tables)), -1, dtype=torch.int32)
    for row, table in zip(rows, tables, strict=True):
        row[: len(table)] = table
    return rows
