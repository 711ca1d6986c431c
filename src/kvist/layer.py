"""The cache of one layer with the plain interface: store a key, store a value, get them back, attend over them.

    cache = LayerCache(num_kv_heads=2, head_dim=64, capacity=1024)
    cache.append(k, v)            # many tokens at once: [T, G, D] and [T, G, Dv]
    out = cache.attend(q)         # [T, H, D] -> [T, H, Dv], the queries of the newest T tokens

Two numbers that are easily confused stay apart: ``seen`` counts the tokens that were ever written and is the position
of the next one; ``resident`` counts the rows that can still be read. They differ once a window or a ring is full.
Positions are absolute and never renumbered.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from kvist.base.dtypes import BFLOAT16, parse_dtype
from kvist.base.errors import CacheError, KernelError, NotResident, TooLong, UsageError
from kvist.cache.addressing import SPLIT, Addressing, Contiguous, Paged, Ring
from kvist.cache.encoding import PLAIN, elements_per_pair
from kvist.cache.layout import Group, Layout
from kvist.cache.pool import Pool
from kvist.cache.rows import KeyValue, Latent
from kvist.cache.table import Table
from kvist.kernels.blockformat import k_tiles, read_k, read_v, v_tiles, write_kv
from kvist.kernels.ops import TILE, Attend, Backend, LayerStore, Step


class LayerCache:
    """Keys and values of one layer, G kv heads wide, filled in order, each cell written once.

    ``addressing`` says where rows are put. ``paged``: blocks of ``block_size`` positions, up to ``capacity`` positions.
    ``contiguous``: one block for all of them. ``ring``: bounded memory, any number of positions; ``capacity`` rows stay
    readable, the first ``sinks`` of all and the newest others.

    ``window``: a query sees that many of the newest keys, its own included; older blocks are given back. With a window
    or a ring at most ``chunk`` tokens can be appended at once, since each still has to see the window before it.

    ``value_in_key``: multi-head latent attention. A token leaves one row [c_KV, k_R] for all heads, ``head_dim`` wide,
    and its value is the first ``v_head_dim`` (kv_lora_rank) elements of it, as in
    ``LayerCache(1, 576, 512, value_in_key=True)``. ``append`` and ``store_k`` write it whole. Queries are absorbed
    ones, whose scale must be given.
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        value_in_key: bool = False,
        dtype: str = "float32",
        capacity: int = 4096,
        addressing: Literal["paged", "contiguous", "ring"] = "paged",
        block_size: int = 16,
        window: int | None = None,
        sinks: int = 0,
        chunk: int = 512,
        backend: Backend | None = None,
        poison: bool = False,
    ) -> None:
        """Allocate everything at once. UsageError or LayoutMismatch for what cannot be; ``poison`` is for tests."""
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        if value_in_key and num_kv_heads != 1:
            raise UsageError(f"a latent row is one key for all heads, not {num_kv_heads}: use num_kv_heads=1")
        rows: KeyValue | Latent = KeyValue(num_kv_heads, head_dim, v_head_dim)
        if value_in_key:
            rows = Latent(v_head_dim, head_dim - v_head_dim)
        if capacity <= 0 or chunk <= 0:
            raise UsageError(
                f"a cache of {capacity} rows filled in chunks of {chunk} cannot be: both must be 1 or more"
            )
        if window is not None and window <= 0:
            raise UsageError(f"a window of {window} keys sees nothing: it must be 1 or more")
        if addressing != "ring" and sinks:
            raise UsageError(
                f"{sinks} sinks need addressing='ring': a {addressing} cache drops by window or not at all"
            )
        if addressing == "ring" and window is not None:
            raise UsageError(f"a ring's window is capacity - sinks = {capacity - sinks}: leave window={window} out")
        place, self.window = _place(addressing, capacity, block_size, window, sinks, chunk)
        # The bookkeeping keeps one row more than the next query needs, so that all newest ``window`` rows can be read.
        kept = None if self.window is None else self.window + 1
        group = Group(0, (0,), Layout(rows, parse_dtype(dtype, allowed=PLAIN), place), kept)
        self.capacity, self.sinks, self.chunk = capacity, sinks, chunk
        self._limit = None if addressing == "ring" else capacity
        self._pool = Pool((group,), (group.blocks_for(capacity, chunk),), poison=poison)
        self._table = Table((group,), self._pool.blocks)
        self._store = LayerStore(
            self._pool.data(0),
            group.layout.dtype,
            group.block_size,
            num_kv_heads,
            head_dim,
            v_head_dim,
            0,
            value_in_key,
        )
        self._next_k, self._next_v = [0] * num_kv_heads, [0] * num_kv_heads
        self._backend = backend

    @property
    def seen(self) -> int:
        """Tokens ever written whole: the position of the next one."""
        return self._table.written

    @property
    def start(self) -> int:
        """The first position still readable, sinks aside."""
        return 0 if self.window is None else max(0, self.seen - self.window)

    @property
    def positions(self) -> list[int]:
        """The positions that can be read, ascending: the sinks, then ``start`` to ``seen - 1``."""
        return [*range(min(self.sinks, self.start)), *range(self.start, self.seen)]

    @property
    def resident(self) -> int:
        """Rows that can be read."""
        return self.seen - self.start + min(self.sinks, self.start)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V allocated."""
        return self._pool.nbytes

    @property
    def dtype(self) -> str:
        """The type that rows are stored in."""
        return self._store.dtype.name

    def __len__(self) -> int:
        """``resident``: how many rows ``retrieve_k`` hands out."""
        return self.resident

    def store_k(self, head: int, pos: int, k: Tensor) -> None:
        """Write the key ``[D]`` of kv head ``head`` at ``pos``; CacheError when that is not its next position."""
        block, slot = self._cell(self._next_k, "key", head, pos, k, self._store.head_dim)
        cell = k_tiles(self._store)[block, head, slot // TILE, :, slot % TILE, :]
        cell.copy_(k.view(cell.shape))
        self._next_k[head] += 1
        if self._store.value_in_key:
            self._next_v[head] += 1
        self._commit()

    def store_v(self, head: int, pos: int, v: Tensor) -> None:
        """Write the value ``[Dv]`` of kv head ``head`` at ``pos``; CacheError when that is not its next position."""
        if self._store.value_in_key:
            raise CacheError(f"the value at position {pos} is part of its key: store_k has written both")
        block, slot = self._cell(self._next_v, "value", head, pos, v, self._store.v_head_dim)
        tile, lane = divmod(slot, TILE)
        pair = elements_per_pair(self._store.dtype)
        v_tiles(self._store)[block, head, tile, lane // pair, :, lane % pair].copy_(v)
        self._next_v[head] += 1
        self._commit()

    def append(self, k: Tensor, v: Tensor | None = None) -> None:
        """Write the next T tokens of all heads: k ``[T, G, D]`` and v ``[T, G, Dv]``, each element rounded once.

        ``v`` is left out when values lie in the keys.
        """
        store = self._store
        if k.dim() != 3 or k.shape[1:] != (store.num_kv_heads, store.head_dim):
            raise UsageError(f"keys {list(k.shape)} are not [T, {store.num_kv_heads}, {store.head_dim}]")
        expected = None if store.value_in_key else (k.shape[0], store.num_kv_heads, store.v_head_dim)
        found = None if v is None else tuple(v.shape)
        if found != expected:
            wanted = "left out: they lie in the keys" if expected is None else list(expected)
            raise UsageError(f"values {'left out' if found is None else list(found)} are not {wanted}")
        seen = self.seen
        if max(*self._next_k, *self._next_v) > seen:
            raise CacheError(f"position {seen} is half written: store its missing keys and values before appending")
        stop = seen + k.shape[0]
        self._reserve(stop)
        write_kv(store, self._row(), torch.arange(seen, stop), k, v)
        self._next_k = [stop] * store.num_kv_heads
        self._next_v = [stop] * store.num_kv_heads
        self._commit()

    def retrieve_k(self, head: int) -> Tensor:
        """All readable keys of kv head ``head``, ``[resident, D]`` in position order, in the stored type. A copy."""
        self._check_head(head)
        spans = [read_k(self._store, self._row(), first, stop)[:, head] for first, stop in self._spans()]
        return torch.cat(spans)

    def retrieve_v(self, head: int) -> Tensor:
        """All readable values of kv head ``head``, ``[Dv, resident]``: transposed, so that out = V p.

        A view of the cache itself where the layout allows (contiguous, not bfloat16, nothing dropped), else a copy.
        Rows in a view do not change while they are resident.
        """
        self._check_head(head)
        single = self._store.data.shape[0] == 1 and not self._store.value_in_key
        if single and self._store.dtype != BFLOAT16 and self.start == 0:
            return v_tiles(self._store)[0, head].view(-1, self._store.v_head_dim)[: self.seen].T
        spans = [read_v(self._store, self._row(), first, stop)[:, head] for first, stop in self._spans()]
        return torch.cat(spans).T

    def attend(self, q: Tensor, scale: float | None = None) -> Tensor:
        """Attention of the newest T tokens: q ``[T, H, D]`` to float32 ``[T, H, Dv]``; of the newest: ``[H, D]``.

        Query t stands at position seen - T + t and sees every key up to its own (in a window or ring: those that
        remain). Query head h reads kv head h // (H / G). ``scale`` is 1 / sqrt(D) unless given; over latent rows it
        must be (UsageError), since D there is not the width of a head's key.
        NotResident when the oldest query would see a key that was given back.
        """
        if q.dim() == 2:
            return self.attend(q[None], scale)[0]
        store = self._store
        if q.dim() != 3 or q.shape[2] != store.head_dim:
            raise UsageError(f"queries {list(q.shape)} are not [T, H, {store.head_dim}] or [H, {store.head_dim}]")
        tokens, heads = q.shape[0], q.shape[1]
        first = self.seen - tokens
        if first < 0:
            raise UsageError(f"{tokens} queries need {tokens} tokens in the cache, which has {self.seen}: append first")
        oldest = 0 if self.window is None else max(0, first - self.window + 1)
        if oldest < self._table.start(0):
            raise NotResident(
                f"the query at position {first} would see keys from {oldest} on, but everything before "
                f"{self._table.start(0)} was given back: attend to at most the newest chunk"
            )
        if store.value_in_key and scale is None:
            raise UsageError("give the scale of the expanded key, 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)")
        factor = 1 / math.sqrt(store.head_dim) if scale is None else scale
        scaled = (q.float() * factor).to(torch.bfloat16 if store.dtype == BFLOAT16 else torch.float32).contiguous()
        out = torch.empty(tokens, heads * store.v_head_dim)
        op = Attend("attend", scaled, out, store, heads, self.window, self.sinks)
        backend = self._chosen()
        refusal = backend.refuses(op)
        if refusal is not None:
            raise KernelError(f"{backend.name} cannot attend: {refusal}")
        backend.compile([op]).run(self._step(first))
        return out.view(tokens, heads, store.v_head_dim)

    def truncate(self, length: int) -> None:
        """Forget every cell from position ``length`` on; beyond the end that changes nothing.

        NotResident, and nothing changes, once a window or ring has dropped rows: the ones before ``length`` that its
        next query needs are gone. Truncating to 0 empties any cache.
        """
        if length < 0:
            raise UsageError(f"a cache cannot be cut to {length} tokens: use 0 or more")
        if 0 < length < self.seen and self.window is not None and self.start > 0:
            raise NotResident(
                f"the cache cannot go back from {self.seen} to {length} tokens: position {length} would see keys from "
                f"{max(0, length - self.window + 1)} on, but the newest {self.window} kept begin at {self.start}; "
                "truncate to 0 and append again"
            )
        self._table.truncate(length)
        self._next_k = [min(next_, length) for next_ in self._next_k]
        self._next_v = [min(next_, length) for next_ in self._next_v]

    def _cell(self, next_: list[int], what: str, head: int, pos: int, x: Tensor, width: int) -> tuple[int, int]:
        """(block, slot) of the cell to write, reserved."""
        self._check_head(head)
        if tuple(x.shape) != (width,):
            raise UsageError(f"a {what} of shape {list(x.shape)} is not [{width}]")
        if pos != next_[head]:
            done = "was written before, and a cell is written once" if pos < next_[head] else "would leave a gap"
            raise CacheError(f"the {what} of head {head} at position {pos} {done}: its next position is {next_[head]}")
        self._reserve(pos + 1)
        return self._table.entries(0)[pos // self._store.block_size], pos % self._store.block_size

    def _reserve(self, stop: int) -> None:
        """Make places up to ``stop``."""
        if stop <= self._table.length:
            return
        if self._limit is not None and stop > self._limit:
            raise TooLong(f"{stop} tokens exceed the cache's capacity of {self._limit}: make it larger, or use a ring")
        if self.window is not None and stop - self.seen > self.chunk:
            raise TooLong(
                f"{stop - self.seen} tokens at once exceed the {self.chunk} that there is room for beside the window "
                f"of {self.window}: append at most chunk={self.chunk} at a time"
            )
        self._table.give_back()
        self._table.extend(stop - self._table.length)

    def _commit(self) -> None:
        self._table.commit(min(*self._next_k, *self._next_v) - self._table.written)

    def _spans(self) -> list[tuple[int, int]]:
        """Ranges of positions that can be read."""
        return [(0, min(self.sinks, self.start)), (self.start, self.seen)]

    def _row(self) -> Tensor:
        return torch.tensor(self._table.entries(0), dtype=torch.int32)

    def _step(self, first: int) -> Step:
        tokens = self.seen - first
        return Step(
            tokens=torch.zeros(tokens, dtype=torch.int32),
            positions=torch.arange(first, self.seen, dtype=torch.int32),
            starts=torch.tensor([0, tokens], dtype=torch.int32),
            tables=(self._row()[None],),
            rows=torch.zeros(0, dtype=torch.int32),
        )

    def _chosen(self) -> Backend:
        if self._backend is None:
            from kvist.kernels.dispatch import best_backend  # storing rows needs no kernels

            self._backend = best_backend()
        return self._backend

    def _check_head(self, head: int) -> None:
        if not 0 <= head < self._store.num_kv_heads:
            raise UsageError(f"kv head {head} does not exist: there are {self._store.num_kv_heads}")


def _place(
    addressing: str, capacity: int, block_size: int, window: int | None, sinks: int, chunk: int
) -> tuple[Addressing, int | None]:
    """(where rows are put, how many newest keys a query sees)."""
    if addressing == "paged":
        return Paged(block_size), window
    if addressing == "contiguous":
        # One block that kernels can read: whole tiles, and within splits of 128 or whole splits.
        sizes = [size for size in (16, 32, 64) if size >= capacity]
        return Contiguous(sizes[0] if sizes else -(-capacity // SPLIT) * SPLIT), window
    if addressing == "ring":
        Ring(capacity, sinks, block_size, chunk)  # refuses with the caller's own numbers
        return Ring(capacity + 1, sinks, block_size, chunk), capacity - sinks
    raise UsageError(f"unknown addressing {addressing!r}: use paged, contiguous or ring")
