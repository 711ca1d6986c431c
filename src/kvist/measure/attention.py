"""Attention alone: one new token against caches that no processor cache holds, for each type and shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from kvist.cache.sizing import BLOCK_SIZE
from kvist.kernels.blockformat import block_elements
from kvist.kernels.ops import Attend, Backend, LayerStore, Op, Step, torch_dtype
from kvist.measure.limits import PASS_SECONDS, beyond_cache
from kvist.measure.rate import Clock, Rate, rate, repeat
from kvist.model.buffers import key_width, value_width
from kvist.spec.model import LatentAttention, ModelSpec

KV_HEADS = 4
GROUPS, WIDTHS, DTYPES = (1, 3, 4, 8), (64, 128, 256), (BFLOAT16, FLOAT16, FLOAT32)
DEPTH = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """One geometry of attention over ``depth`` stored tokens; ``latent``: values are the beginnings of the keys."""

    dtype: DType
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    depth: int
    latent: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that one new token reads in one layer."""
        return self.depth * self.kv_heads * (self.head_dim + self.v_stored) * self.dtype.bytes

    @property
    def operations(self) -> int:
        """Floating-point operations of one new token in one layer: every head meets every stored token."""
        return 2 * self.depth * self.heads * (self.head_dim + self.v_head_dim)

    @property
    def v_stored(self) -> int:
        """Channels of a value that stand beside its key."""
        return 0 if self.latent else self.v_head_dim


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """GB/s of keys and values that went through one shape's attention."""

    shape: Shape
    rate: Rate

    def json(self) -> dict[str, Any]:
        """One object for a report."""
        s = self.shape
        return {
            "kv_dtype": s.dtype.name,
            "heads": s.heads,
            "kv_heads": s.kv_heads,
            "head_dim": s.head_dim,
            "depth": s.depth,
        } | self.rate.json("gbps")


def shapes(spec: ModelSpec, kv_dtype: DType, *, everything: bool) -> list[Shape]:
    """The model's own shapes (windows left out: a window is a shallow cache); ``everything``: the whole matrix too."""
    own = []
    for layer in spec.layers:
        a = layer.attention
        kv_heads = 1 if isinstance(a, LatentAttention) else a.num_kv_heads
        latent = isinstance(a, LatentAttention)
        shape = Shape(kv_dtype, a.num_heads, kv_heads, key_width(a), value_width(a), DEPTH, latent)
        if shape not in own:
            own.append(shape)
    matrix = [Shape(t, KV_HEADS * group, KV_HEADS, d, d, DEPTH) for t in DTYPES for d in WIDTHS for group in GROUPS]
    return own + [shape for shape in matrix if everything and shape not in own]


def attention_rates(
    backend: Backend,
    wanted: Iterable[Shape],
    limit: float | None,
    clock: Clock,
    repeats: int,
    flops: float | None = None,
) -> list[AttentionRate]:
    """Each shape's rate; shapes that the backend refuses are left out.

    ``limit``: the bandwidth of memory in GB/s; ``flops``: the fastest product per second. Many heads over one latent
    reach the second first: what can be reached is the lower of the two.
    """
    bench = AttentionBench(backend)
    found = []
    for shape in wanted:
        values = bench.measure(shape, clock, repeats)
        if values:
            roof = limit
            if limit is not None and flops is not None:
                roof = min(limit, flops * shape.nbytes / shape.operations / 1e9)
            found.append(AttentionRate(shape, rate([value / 1e9 for value in values], roof)))
    return found


class AttentionBench:
    """Layers of one token's attention, as many as a working set beyond every cache takes, run as one list."""

    def __init__(self, backend: Backend, nbytes: int | None = None) -> None:
        """``nbytes``: the working set, by default beyond the last-level cache."""
        self.backend = backend
        self.nbytes = beyond_cache() if nbytes is None else nbytes
        self._memory: dict[str, torch.Tensor] = {}

    def measure(self, shape: Shape, clock: Clock, repeats: int) -> list[float]:
        """Bytes of keys and values per second, once for each repeat; empty when the backend refuses the shape."""
        ops, step = self.operations(shape)
        if any(self.backend.refuses(op) for op in ops[:1]):
            return []
        executor = self.backend.compile(list(ops))
        return repeat(lambda: executor.run(step), len(ops) * shape.nbytes, clock, repeats, PASS_SECONDS)

    def operations(self, shape: Shape) -> tuple[Sequence[Op], Step]:
        """The operations of all layers, each over bytes of its own, and the step that they run in."""
        blocks = -(-shape.depth // BLOCK_SIZE)
        block = block_elements(shape.kv_heads, shape.head_dim, shape.v_stored, BLOCK_SIZE) * shape.dtype.bytes
        layers = max(1, -(-self.nbytes // (blocks * block)))
        data = self._filled(shape.dtype, layers * blocks * block).view(layers, blocks, block)
        q_type = torch.bfloat16 if shape.dtype == BFLOAT16 else torch.float32
        q = (torch.randn(1, shape.heads * shape.head_dim) * shape.head_dim**-0.5).to(q_type)
        out = torch.zeros(1, shape.heads * shape.v_head_dim)
        ops: list[Op] = []
        for i in range(layers):
            widths = (shape.kv_heads, shape.head_dim, shape.v_head_dim)
            store = LayerStore(data[i], shape.dtype, BLOCK_SIZE, *widths, 0, value_in_key=shape.latent)
            ops.append(Attend(f"attend {i}", q, out, store, shape.heads))
        step = Step(
            torch.zeros(1, dtype=torch.int32),
            torch.tensor([shape.depth - 1], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
            (torch.arange(blocks, dtype=torch.int32)[None],),
            torch.zeros(0, dtype=torch.int32),
        )
        return ops, step

    def _filled(self, dtype: DType, nbytes: int) -> torch.Tensor:
        """``nbytes`` bytes of random elements, 64-byte aligned; kept for the next shape of the same type."""
        held = self._memory.get(dtype.name)
        if held is None or len(held) < nbytes:
            self._memory.clear()
            raw = torch.empty(nbytes + 64, dtype=torch.uint8)
            held = raw[-raw.data_ptr() % 64 :][:nbytes]
            some = torch.randn(1 << 18).to(torch_dtype(dtype)).view(torch.uint8)
            for start in range(0, nbytes, len(some)):
                part = held[start : start + len(some)]
                part.copy_(some[: len(part)])
            self._memory[dtype.name] = held
        return held[:nbytes]
