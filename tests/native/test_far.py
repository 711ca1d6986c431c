"""Offsets beyond 2^31 elements, in memory of which almost nothing is ever touched; and texts of 100,000 tokens.

A 32-bit index would fall short of the place by a multiple of 2^32 bytes or elements: it would read zeros, or leave the
process. Each far result must have the bits of the same computation near the beginning.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from kvist.kernels.blockformat import block_elements, read_k, read_v
from kvist.kernels.native import NativeBackend, variants
from kvist.kernels.ops import Append, AppendLatent, Attend, Embed, LayerStore, Linear, NormWeight, Op, Step, torch_dtype
from kvist.verify.compare import assert_bits_equal, assert_close, attend_bound
from kvist.verify.course import Course
from random_models import KINDS, random_tokens, spec_of, subject_of

pytestmark = pytest.mark.skipif(not variants() or sys.platform != "linux", reason="native kernels and lazy memory")

NORESERVE = 0x4000  # of mmap on Linux: memory that is promised only when it is touched
FAR = 2**31


@contextmanager
def sparse(nbytes: int) -> Iterator[Tensor]:
    """Bytes that cost nothing until they are written."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    view = (ctypes.c_uint8 * nbytes).from_buffer(memory)
    yield torch.frombuffer(view, dtype=torch.uint8)
    # Pages go when the last reference does; torch may hold one for a moment longer.


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step_of(tokens: int, table: Tensor | None = None, ids: Tensor | None = None) -> Step:
    return Step(
        torch.zeros(tokens, dtype=torch.int32) if ids is None else ids,
        torch.arange(tokens, dtype=torch.int32),
        ints(0, tokens),
        () if table is None else (table[None],),
        ints(),
    )


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=lambda d: d.name)
def test_blocks_beyond_two_to_the_31(variant: str, dtype: DType) -> None:
    heads, kv_heads, width, size, tokens = 6, 2, 64, 64, 300
    block_bytes = block_elements(kv_heads, width, width, size) * dtype.bytes
    blocks = FAR * dtype.bytes // block_bytes + 16
    needed = -(-tokens // size)
    far = torch.arange(blocks - needed, blocks, dtype=torch.int32)
    assert int(far[0]) * block_bytes // dtype.bytes >= FAR
    results = []
    with sparse(blocks * block_bytes) as memory:
        store = LayerStore(memory.view(blocks, block_bytes), dtype, size, kv_heads, width, width, 0)
        backend = NativeBackend(variant, 2)
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * width)
        for table in (torch.arange(needed, dtype=torch.int32), far):
            q = torch.zeros(tokens, heads * width, dtype=torch.bfloat16 if dtype == BFLOAT16 else torch.float32)
            out = torch.zeros(tokens, heads * width)
            ops: list[Op] = [Append("append", qkv, q, store, heads, 0.1), Attend("attend", q, out, store, heads)]
            backend.compile(ops).run(step_of(tokens, table))
            results.append((read_k(store, table, 0, tokens), read_v(store, table, 0, tokens), out))
    expected = qkv[:, heads * width : (heads + kv_heads) * width].view(tokens, kv_heads, width)
    assert_bits_equal(results[1][0], expected.to(torch_dtype(dtype)))
    for near, away in zip(*results, strict=True):
        assert_bits_equal(away, near)


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=lambda d: d.name)
def test_latents_beyond_two_to_the_31(variant: str, dtype: DType) -> None:
    heads, rank, rope, size, tokens = 6, 48, 16, 64, 300
    width, needed = rank + rope, -(-tokens // size)
    block_bytes = size * width * dtype.bytes
    blocks = FAR * dtype.bytes // block_bytes + 16
    far = torch.arange(blocks - needed, blocks, dtype=torch.int32)
    assert int(far[0]) * block_bytes // dtype.bytes >= FAR
    results = []
    with sparse(blocks * block_bytes) as memory:
        store = LayerStore(memory.view(blocks, block_bytes), dtype, size, 1, width, rank, 0, value_in_key=True)
        rows, query = torch.randn(tokens, width), torch.randn(tokens, heads * rope)
        absorbed = torch.randn(tokens, heads * rank)
        for table in (torch.arange(needed, dtype=torch.int32), far):
            q = torch.zeros(tokens, heads * width, dtype=torch.bfloat16 if dtype == BFLOAT16 else torch.float32)
            out = torch.zeros(tokens, heads * rank)
            ops: list[Op] = [
                AppendLatent("append", query, absorbed, rows, q, store, heads, 0.1),
                Attend("attend", q, out, store, heads),
            ]
            NativeBackend(variant, 2).compile(ops).run(step_of(tokens, table))
            results.append((read_k(store, table, 0, tokens), out))
    assert_bits_equal(results[1][0][:, 0], rows.to(torch_dtype(dtype)))
    for near, away in zip(*results, strict=True):
        assert_bits_equal(away, near)


@pytest.mark.parametrize("variant", variants())
def test_rows_beyond_two_to_the_31(variant: str) -> None:
    """Buffers whose rows lie a gigabyte apart: what a step reads, adds to and leaves."""
    k, n, rows, stride = 64, 96, 5, 2**29 + 16
    backend = NativeBackend(variant, 2)
    plain, glu = backend.weight(n, k, FLOAT32), backend.weight(n, k, FLOAT32, glu=True)
    for weight in (plain, glu):
        weight.fill(0, torch.randn(n, k))
    norm = NormWeight(torch.randn(k), 1e-5)
    table = torch.randn(n, k)
    words = backend.weight(n, k, FLOAT32)
    words.fill(0, table)
    assert (rows - 1) * stride >= FAR
    found = []
    with sparse(rows * stride * 4) as a, sparse(rows * stride * 4) as b, sparse(rows * stride * 4) as c:
        far = [part.view(torch.float32).view(rows, stride) for part in (a, b, c)]
        near = [torch.empty(rows, k), torch.zeros(rows, n), torch.zeros(rows, n // 2)]
        for source, out, gated in (near, far):
            source, out, gated = source[:, :k], out[:, :n], gated[:, : n // 2]
            ops: list[Op] = [
                Embed("embed", words, 1.0, source),
                Linear("store", source, plain, out, norm=norm),
                Linear("add", source, plain, out, epilogue="add"),
                Linear("glu", source, glu, gated, epilogue="glu", norm=norm),
            ]
            backend.compile(ops).run(step_of(rows, ids=ints(3, 1, 95, 0, 7)))
            found.append([t.clone() for t in (source, out, gated)])
    del far
    assert_bits_equal(found[0][0], table[[3, 1, 95, 0, 7]])
    for close, away in zip(*found, strict=True):
        assert_bits_equal(away, close)


@pytest.mark.full
def test_weights_beyond_two_to_the_31() -> None:
    """A vocabulary of so many rows that the last stand behind 2^31 elements: embedded, and multiplied with."""
    k = 2048
    n = FAR // k + 64
    backend = NativeBackend(None, 2)
    weight = backend.weight(n, k, BFLOAT16)  # zeros that no page was given for
    last = torch.randn(32, k).bfloat16()
    weight.fill(n - 32, last)
    assert_bits_equal(weight.rows(torch.arange(n - 32, n)), last.float())
    embedded = torch.zeros(2, k)
    x, logits = torch.randn(1, k).bfloat16(), torch.empty(1, n)
    ops: list[Op] = [Embed("embed", weight, 1.0, embedded), Linear("head", x, weight, logits)]
    backend.compile(ops[:1]).run(step_of(2, ids=ints(n - 1, 5)))
    backend.compile(ops[1:]).run(step_of(1))
    assert_bits_equal(embedded[0], last[-1].float())
    near, few = backend.weight(32, k, BFLOAT16), torch.empty(1, 32)
    near.fill(0, last)
    backend.compile([Linear("head", x, near, few)]).run(step_of(1))
    assert_bits_equal(logits[:, n - 32 :].contiguous(), few)
    assert int(logits.count_nonzero()) == 32


def test_one_token_over_100_000_keys_by_value() -> None:
    heads, kv_heads, width, size, keys = 4, 2, 32, 128, 100_000
    blocks = -(-keys // size)
    for dtype in (BFLOAT16, FLOAT32):
        data = torch.zeros(blocks, block_elements(kv_heads, width, width, size) * dtype.bytes, dtype=torch.uint8)
        data.view(torch_dtype(dtype)).normal_()
        store = LayerStore(data, dtype, size, kv_heads, width, width, 0)
        table = torch.arange(blocks, dtype=torch.int32)
        q = torch.randn(1, heads * width).to(torch.bfloat16 if dtype == BFLOAT16 else torch.float32)
        out = torch.empty(1, heads * width)
        step = replace(step_of(1, table), positions=ints(keys - 1))
        NativeBackend(None, 2).compile([Attend("attend", q, out, store, heads)]).run(step)
        k = read_k(store, table, 0, keys).double().repeat_interleave(heads // kv_heads, 1)
        v = read_v(store, table, 0, keys).double().repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("hd,khd->hk", q.double().view(heads, width), k)
        expected = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
        assert_close(out.view(heads, width), expected.float(), attend_bound(dtype.name, float(scores.abs().max())))


@pytest.mark.full
def test_a_text_of_100_000_tokens_keeps_the_first_law() -> None:
    """A small model with a window layer and a full one: the last logits do not depend on how the text was cut."""
    kind = replace(KINDS["windows"], heads=2, kv_heads=1, windows=(500, None))
    length = 100_000
    subject = subject_of(kind, BFLOAT16, NativeBackend(None, 2))
    tokens = random_tokens(length)
    found = []
    for chunk, block_size in ((2048, 128), (1000, 64)):
        spec = replace(spec_of(kind), max_position=length)
        course = Course(subject, length=length, step_tokens=chunk, block_size=block_size, spec=spec)
        lane = course.lane(tokens)
        course.run(lane, length - 3, chunk, keep=False)
        course.run(lane, length, 1)
        assert lane.dropped >= (length - 500) // block_size - chunk // block_size
        found.append([lane.digests[p] for p in range(length - 3, length)])
    assert found[0] == found[1]
