"""The kernel fingerprint: a digest of what the kernels answer on fixed probes, not a version string.

Two backends with one fingerprint give the same bits on the probes; it becomes part of every stored block's key.
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from kvist.kernels.blockformat import block_elements
from kvist.kernels.native import NativeBackend
from kvist.kernels.ops import (
    Append,
    AppendLatent,
    Attend,
    Backend,
    Combine,
    GroupedLinear,
    LayerStore,
    Linear,
    NormWeight,
    Op,
    Route,
    Step,
    torch_dtype,
)
from kvist.kernels.packed import FACTORS, PACKED_TYPES
from kvist.spec.gguf_types import BY_NAME, IDS

_LENGTH = 300  # positions: three splits, the last one partly filled


def fingerprint(backend: Backend) -> str:
    """Sixteen hex digits over the outputs of products, gates, norms, rotation, attention and routing in every type."""
    digest = xxhash.xxh3_64()
    for dtype in (BFLOAT16, FLOAT32):
        for buffer in (*_linear(backend, dtype), *_experts(backend, dtype)):
            digest.update(_bytes(buffer))
    if isinstance(backend, NativeBackend):
        for kind in PACKED_TYPES:
            for buffer in _packed(backend, kind):
                digest.update(_bytes(buffer))
    for dtype in (BFLOAT16, FLOAT16, FLOAT32):
        for window, softcap in ((None, None), (150, 30.0)):
            for buffer in _attention(backend, dtype, window, softcap):
                digest.update(_bytes(buffer))
        for buffer in _latents(backend, dtype):
            digest.update(_bytes(buffer))
    return digest.hexdigest()


def _values(seed: int, *shape: int) -> Tensor:
    """Fixed float32 values in [-1, 1) on a grid of 2^-15, from a linear congruential sequence, no library."""
    count = 1
    for extent in shape:
        count *= extent
    state, out = seed, []
    for _ in range(count):
        state = (state * 214013 + 2531011) % 2**32
        out.append((state >> 16) / 32768.0 - 1.0)
    return torch.tensor(out, dtype=torch.float32).view(shape)


def _step(tokens: int, tables: tuple[Tensor, ...] = ()) -> Step:
    return Step(
        torch.zeros(tokens, dtype=torch.int32),
        torch.arange(tokens, dtype=torch.int32),
        torch.tensor([0, tokens], dtype=torch.int32),
        tables,
        torch.zeros(0, dtype=torch.int32),
    )


def _linear(backend: Backend, dtype: DType) -> list[Tensor]:
    n, k, tokens = 96, 128, 5
    plain, glu = backend.weight(n, k, dtype), backend.weight(n, k, dtype, glu=True)
    values = _values(1, n, k)
    plain.fill(0, values)
    glu.fill(0, values)
    x = _values(2, tokens, k)
    out, gated = torch.zeros(tokens, n), torch.zeros(tokens, n // 2, dtype=torch_dtype(dtype))
    silu = torch.zeros_like(gated)
    norm = NormWeight(_values(3, k) + 2, 1e-5)
    ops: list[Op] = [
        Linear("probe", x, plain, out, norm=norm),
        Linear("probe", x, glu, gated, epilogue="glu", norm=norm, activation="gelu_tanh"),
        Linear("probe", x, glu, silu, epilogue="glu", norm=norm),
    ]
    backend.compile(ops).run(_step(tokens))
    return [out, gated, silu]


def _packed(backend: NativeBackend, kind: str) -> list[Tensor]:
    """Blocks of ``kind`` with arbitrary quants and small factors, times one row and times five."""
    n, k = 34, 256
    stored = BY_NAME[kind]
    raw = ((_values(8, n * k // stored.elements, stored.nbytes) + 1) * 128).to(torch.uint8)
    for at in FACTORS[kind]:
        factors = (_values(9 + at, len(raw)) / 16).to(torch.float16)
        raw[:, at : at + 2] = factors.view(torch.uint8).view(-1, 2)
    weight = backend.packed([(n, kind)], k)
    weight.fill_gguf(raw.data_ptr(), IDS[kind], n, torch.arange(n))
    x, out = _values(2, 5, k), torch.zeros(6, n)
    for first, rows in ((0, 1), (1, 5)):
        backend.compile([Linear("probe", x[:rows], weight, out[first : first + rows])]).run(_step(rows))
    return [weight.rows(torch.arange(n)), out]


def _attention(backend: Backend, dtype: DType, window: int | None, softcap: float | None) -> list[Tensor]:
    heads, kv_heads, width, size = 4, 2, 32, 32
    blocks = -(-_LENGTH // size)
    data = torch.zeros(blocks, block_elements(kv_heads, width, width, size) * dtype.bytes, dtype=torch.uint8)
    store = LayerStore(data, dtype, size, kv_heads, width, width, 0)
    qkv = _values(4, _LENGTH, (heads + 2 * kv_heads) * width)
    q = torch.zeros(_LENGTH, heads * width, dtype=torch.bfloat16 if dtype == BFLOAT16 else torch.float32)
    out = torch.zeros(_LENGTH, heads * width)
    # The rotation table is data here, as in a model: any pair of small numbers probes the multiplication.
    cos, sin = _values(5, _LENGTH, width // 2), _values(6, _LENGTH, width // 2)
    norm = NormWeight(_values(7, width) + 2, 1e-6)
    ops: list[Op] = [
        Append("probe", qkv, q, store, heads, width**-0.5, cos, sin, norm, norm),
        Attend("probe", q, out, store, heads, window, 0, softcap),
    ]
    table = torch.arange(blocks, dtype=torch.int32)[None]
    backend.compile(ops).run(_step(_LENGTH, (table,)))
    return [q, data, out]


def _latents(backend: Backend, dtype: DType) -> list[Tensor]:
    heads, nope, rank, rope, size = 3, 6, 40, 8, 32
    blocks = -(-_LENGTH // size)
    data = torch.zeros(blocks, size * (rank + rope) * dtype.bytes, dtype=torch.uint8)
    store = LayerStore(data, dtype, size, 1, rank + rope, rank, 0, value_in_key=True)
    rows, absorbed = _values(4, _LENGTH, rank + rope), _values(10, _LENGTH, heads * rank)
    query = torch.zeros(_LENGTH, heads * (rank + rope), dtype=torch.bfloat16 if dtype == BFLOAT16 else torch.float32)
    out = torch.zeros(_LENGTH, heads * rank)
    cos, sin = _values(5, _LENGTH, rope // 2), _values(6, _LENGTH, rope // 2)
    q, norm = _values(11, _LENGTH, heads * (nope + rope)), NormWeight(_values(7, rank) + 2, 1e-6)
    ops: list[Op] = [
        AppendLatent("probe", q, absorbed, rows, query, store, heads, (nope + rope) ** -0.5, cos, sin, norm),
        Attend("probe", query, out, store, heads),
    ]
    backend.compile(ops).run(_step(_LENGTH, (torch.arange(blocks, dtype=torch.int32)[None],)))
    return [query, data, out]


def _experts(backend: Backend, dtype: DType) -> list[Tensor]:
    experts, ranks, n, k, tokens = 4, 2, 48, 64, 5
    ups = tuple(backend.weight(n, k, dtype, glu=True) for _ in range(experts))
    downs = tuple(backend.weight(k, n // 2, dtype) for _ in range(experts))
    for expert in range(experts):
        ups[expert].fill(0, _values(12 + expert, n, k))
        downs[expert].fill(0, _values(20 + expert, k, n // 2))
    ids, gates = torch.zeros(tokens, ranks, dtype=torch.int32), torch.zeros(2, tokens, ranks)
    gated, answers = torch.zeros(tokens, ranks * n // 2), torch.zeros(tokens, ranks * k)
    x, out, scores = _values(28, tokens, k), _values(29, tokens, k), 2 * _values(30, tokens, experts)
    ops: list[Op] = [
        Route("probe", scores, ids, gates[0], ranks, "sigmoid", 2, 1, "top2", _values(31, experts), True, 2.5),
        Route("probe", scores, ids, gates[1], ranks),
        GroupedLinear("probe", x, ups, gated, ranks, ids, epilogue="glu", norm=NormWeight(_values(32, k) + 2, 1e-5)),
        GroupedLinear("probe", gated, downs, answers, ranks, ids, source_stride=n // 2),
        Combine("probe", answers, gates[1], out),
    ]
    backend.compile(ops).run(_step(tokens))
    return [gates, ids, gated, answers, out]


def _bytes(buffer: Tensor) -> bytes:
    return buffer.contiguous().view(torch.uint8).numpy().tobytes()
