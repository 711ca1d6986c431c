"""What this machine can do at most, and what a token must at least read and compute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.base.machine import available_memory
from kvist.cache.layout import Group
from kvist.cache.sizing import row_bytes
from kvist.kernels.native import NativeBackend
from kvist.kernels.ops import Backend, Linear, Op, Step, torch_dtype
from kvist.measure.rate import Clock, Rate, rate, repeat
from kvist.model.buffers import first_width, key_width, value_width
from kvist.plan.device import last_level_cache
from kvist.spec.model import Attention, FeedForward, LatentAttention, MixtureOfExperts, ModelSpec

MIB = 2**20
BEYOND_CACHE = 4  # a working set of so many last-level caches is read from memory
PASS_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Reading:
    """How fast ``threads`` threads read ``nbytes`` bytes that lie in ``source``: ``ram`` or ``cache``; GB/s."""

    source: str
    threads: int
    nbytes: int
    rate: Rate

    def json(self) -> dict[str, Any]:
        """One object for a report."""
        found = self.rate.json("gbps")
        return {"from": self.source, "threads": self.threads, "bytes": self.nbytes} | {
            key: found[key] for key in ("gbps", "min", "max", "repeats")
        }


def beyond_cache(wanted: int = 0) -> int:
    """Bytes of a working set that no cache holds, at least ``wanted``, and no more than a quarter of what is free."""
    size = max(BEYOND_CACHE * last_level_cache(), 128 * MIB, wanted)
    free = available_memory()
    return size if free is None else max(16 * MIB, min(size, free // 4))


def read_bandwidth(backend: Backend, threads: Iterable[int], clock: Clock, repeats: int) -> list[Reading]:
    """Reading from memory and from the last-level cache (half of it), for each number of threads."""
    ram = np.ones(beyond_cache(), np.uint8)
    cache = min(last_level_cache() // 2, len(ram))
    found = []
    for count in threads:
        for source, nbytes in (("ram", len(ram)), ("cache", cache)):
            values = _read(backend, ram[:nbytes], count, clock, repeats)
            found.append(Reading(source, count, nbytes, rate([value / 1e9 for value in values])))
    return found


def _read(
    backend: Backend, data: np.ndarray[Any, np.dtype[np.uint8]], threads: int, clock: Clock, n: int
) -> list[float]:
    """Bytes per second, once for each repeat."""
    if isinstance(backend, NativeBackend):
        native, address, nbytes = backend.native, data.ctypes.data, data.nbytes
        once = native.read_bandwidth(address, nbytes, threads, 2)
        passes = max(1, int(PASS_SECONDS * once / nbytes))
        return [native.read_bandwidth(address, nbytes, threads, passes) for _ in range(n)]
    parts = np.array_split(data[: data.nbytes // 4 * 4].view(np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        # A dot product with itself: one read of each element, and arithmetic that keeps up with memory.
        return repeat(lambda: list(pool.map(np.dot, parts, parts)), data.nbytes, clock, n, PASS_SECONDS)


@dataclass(frozen=True, slots=True)
class Work:
    """What the tokens of one model cost at least. ``groups`` say which rows of the cache are kept, hence read."""

    spec: ModelSpec
    groups: Sequence[Group]
    weight_bytes: int  # held in memory
    dtype: DType

    @property
    def read_weights(self) -> int:
        """Bytes of weights that every step reads at least.

        All matrices; of separate embeddings one row in place of all; of experts those that one token chooses.
        """
        idle = 0
        for layer in self.spec.layers:
            feed = layer.feed_forward
            if isinstance(feed, MixtureOfExperts):
                idle += (feed.num_experts - feed.top_k) * 3 * feed.intermediate_size * self.spec.hidden_size
        if not self.spec.tied_embeddings:
            idle += (self.spec.vocab_size - 1) * self.spec.hidden_size
        return self.weight_bytes - idle * self.dtype.bytes

    def step_bytes(self, depths: Sequence[float], shared: float = 0) -> float:
        """Bytes that one step must read which gives one token to each request, at ``depths`` tokens of cache.

        ``shared``: how many of these tokens are one prefix of them all, which needs to be read once.
        """
        rows = [row_bytes(self.groups, round(depth)) for depth in depths]
        common = (len(depths) - 1) * row_bytes(self.groups, round(shared)) if depths else 0
        return self.read_weights + sum(rows) - common

    def prefill_operations(self, tokens: int) -> float:
        """Floating-point operations of ``tokens`` tokens of one prompt; logits of the last one only."""
        spec = self.spec
        total = 2.0 * spec.vocab_size * spec.hidden_size
        for layer in spec.layers:
            a = layer.attention
            projected = _projected(layer.attention, spec.hidden_size) + _fed(layer.feed_forward, spec.hidden_size)
            total += 2.0 * tokens * projected
            window = a.window if isinstance(a, Attention) else None
            total += 2.0 * a.num_heads * (key_width(a) + value_width(a)) * visible_pairs(tokens, window)
        return total


def _projected(a: Attention | LatentAttention, hidden: int) -> int:
    """Multiplications of one token in the matrices around attention."""
    total = (first_width(a) + a.num_heads * a.v_head_dim) * hidden
    if isinstance(a, LatentAttention):
        total += a.num_heads * (a.qk_nope_head_dim + a.v_head_dim) * a.kv_lora_rank
        total += (a.q_lora_rank or 0) * a.num_heads * a.qk_head_dim
    return total


def _fed(feed: FeedForward | MixtureOfExperts, hidden: int) -> int:
    """Multiplications of one token in its feed forward, or in the router and those that it chooses."""
    if isinstance(feed, MixtureOfExperts):
        return (3 * (feed.top_k * feed.intermediate_size + feed.shared_size) + feed.num_experts) * hidden
    return (3 if feed.gated else 2) * feed.intermediate_size * hidden


def visible_pairs(tokens: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees, over ``tokens`` positions: n (n + 1) / 2 without a window."""
    if window is None or tokens <= window:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window


def product_rate(
    backend: Backend, dtype: DType, clock: Clock, repeats: int, size: int = 2048, rows: int = 480
) -> float:
    """Floating-point operations per second of the fastest product there is here: a native linear layer's or torch's.

    Not the processor's nominal figure, which nothing reaches: what a prefill would do if it were this product alone.
    """
    element = torch_dtype(dtype)
    x, w = torch.randn(rows, size).to(element), torch.randn(size, size).to(element)
    operations = 2.0 * rows * size * size
    values = repeat(lambda: torch.nn.functional.linear(x, w), operations, clock, repeats, PASS_SECONDS)
    if dtype in (BFLOAT16, FLOAT32) and isinstance(backend, NativeBackend):
        weight = backend.weight(size, size, dtype)
        weight.fill(0, w)
        ops: list[Op] = [Linear("product", x, weight, torch.empty(rows, size))]
        executor, step = backend.compile(ops), plain_step(rows)
        values += repeat(lambda: executor.run(step), operations, clock, repeats, PASS_SECONDS)
    return max(values)


def plain_step(tokens: int) -> Step:
    """A step of ``tokens`` tokens of one request, for operations that read no cache."""
    return Step(
        torch.zeros(tokens, dtype=torch.int32),
        torch.arange(tokens, dtype=torch.int32),
        torch.tensor([0, tokens], dtype=torch.int32),
        (),
        torch.zeros(0, dtype=torch.int32),
    )
