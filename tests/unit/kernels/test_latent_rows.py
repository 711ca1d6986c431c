"""Attention over latent rows on every kernel variant: by value against float64, by bits on every path.

The value of a position is the first channels of its key; nothing else is stored. Whatever no query sees is NaN.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from kvist.base.errors import KernelError
from kvist.kernels.blockformat import k_tiles, read_k, read_v, v_tiles, write_kv
from kvist.kernels.native import NativeBackend, variants
from kvist.kernels.ops import (
    Append,
    AppendLatent,
    Attend,
    AttendExpanded,
    Backend,
    GroupedLinear,
    LayerStore,
    NormWeight,
    Op,
    Step,
    torch_dtype,
)
from kvist.kernels.reference import ReferenceBackend
from kvist.verify.compare import (
    ATTEND_BFLOAT16,
    LOGITS,
    POINTWISE,
    assert_bits_equal,
    assert_close,
    attend_bound,
    bits_equal,
    largest_row_error,
    relative_error,
    rounding_bound,
)
from kvist.verify.kernels import Problem, Shape, attention_problem

JUDGE = ReferenceBackend(torch.float64)
DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=lambda d: d.name)
# The best and the portable variant always; what lies between them only in the full run.
BACKENDS = pytest.mark.parametrize(
    "backend",
    [
        *(
            pytest.param(
                NativeBackend(name, 2),
                marks=[] if name in (variants()[0], variants()[-1]) else pytest.mark.full,
                id=name,
            )
            for name in variants()
        ),
        pytest.param(ReferenceBackend(), id="reference"),
    ],
)
NATIVE = pytest.mark.parametrize("variant", variants())


def latents(
    heads: int,
    rank: int,
    rope: int,
    dtype: DType,
    block_size: int,
    requests: tuple[tuple[int, int], ...],
    seed: int = 0,
) -> Problem:
    """An attention problem over latent rows: the K parts of a problem of one kv head, and no V parts."""
    shape = Shape(heads, 1, rank + rope, rank, dtype, block_size, requests)
    problem = attention_problem(shape, seed)
    store = problem.op.store
    data = store.data[:, : block_size * store.head_dim * dtype.bytes].contiguous()
    op = replace(problem.op, store=replace(store, data=data, value_in_key=True))
    return replace(problem, op=op, v=tuple(k[..., :rank] for k in problem.k))


def check(backend: Backend, problem: Problem) -> None:
    bound, expected = attend_bound(problem.op.store.dtype.name), problem.expected()
    got = problem.run(backend)
    assert_close(got, expected, bound)
    assert_close(got, expected, 4 * bound, measure=largest_row_error)


shapes = st.fixed_dictionaries(
    {
        "heads": st.integers(1, 20) | st.sampled_from([32, 128]),
        "rank": st.sampled_from([1, 7, 8, 16, 24, 33, 64]),
        "rope": st.sampled_from([0, 1, 4, 8, 16]),
        "dtype": st.sampled_from([FLOAT32, BFLOAT16, FLOAT16]),
        "block_size": st.sampled_from([16, 32, 64, 128, 256]),
        "requests": st.lists(
            st.integers(1, 400).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, min(n, 30)))),
            min_size=1,
            max_size=4,
        ).map(tuple),
        "seed": st.integers(0, 99),
    }
)


@BACKENDS
@given(shape=shapes)
@settings(max_examples=40, deadline=None)
def test_any_shape(backend: Backend, shape: dict[str, object]) -> None:
    odd = shape["dtype"] == BFLOAT16 and (shape["rank"] + shape["rope"]) % 2  # type: ignore[operator]
    if not odd and sum(count for _, count in shape["requests"]):  # type: ignore[attr-defined]
        check(backend, latents(**shape))  # type: ignore[arg-type]


@BACKENDS
@DTYPES
@pytest.mark.parametrize(("heads", "rank", "rope"), [(16, 512, 64), (40, 256, 32), (128, 512, 64), (3, 24, 8)])
def test_shapes_of_real_models(backend: Backend, dtype: DType, heads: int, rank: int, rope: int) -> None:
    for block_size, requests in ((16, ((300, 1),)), (128, ((257, 2), (40, 9))), (256, ((130, 1), (129, 3)))):
        check(backend, latents(heads, rank, rope, dtype, block_size, requests))


def everything(dtype: DType, heads: int, rank: int, rope: int, length: int, block_size: int, seed: int = 3) -> Problem:
    """All queries of one sequence of ``length`` positions, whatever its blocks."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-length // block_size)
    kind = torch_dtype(dtype)
    data = torch.full((blocks + 1, block_size * (rank + rope)), torch.nan, dtype=kind).view(torch.uint8)
    store = LayerStore(data, dtype, block_size, 1, rank + rope, rank, 0, value_in_key=True)
    table = torch.arange(blocks, 0, -1, dtype=torch.int32)
    k = torch.randn(length, 1, rank + rope, generator=generator).to(kind)
    write_kv(store, table, torch.arange(length), k, None)
    q = torch.randn(length, heads, rank + rope, generator=generator) / math.sqrt(rank + rope)
    q = q.to(torch.bfloat16 if dtype == BFLOAT16 else torch.float32)
    op = Attend("attend", q, torch.empty(length, heads * rank), store, heads)
    return Problem(op, step_of(((0, length),), (table,)), (k,), (k[..., :rank],))


def step_of(runs: tuple[tuple[int, int], ...], tables: tuple[torch.Tensor, ...]) -> Step:
    """One request for each run of positions first..last-1, with its own table."""
    positions = torch.cat([torch.arange(first, last) for first, last in runs]).to(torch.int32)
    starts = torch.tensor([0, *(last - first for first, last in runs)]).cumsum(0).to(torch.int32)
    return Step(
        torch.zeros_like(positions), positions, starts, (torch.stack(tables),), torch.zeros(0, dtype=torch.int32)
    )


def answer(variant: str, threads: int, problem: Problem, runs: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Outputs of the queries of all runs in one step, every run a request over the same blocks."""
    op, table = problem.op, problem.step.tables[0][0]
    q = torch.cat([op.q[first:last] for first, last in runs])
    out = torch.full((len(q), op.out.shape[1]), torch.nan)
    NativeBackend(variant, threads).compile([replace(op, q=q, out=out)]).run(step_of(runs, (table,) * len(runs)))
    return out


@NATIVE
@DTYPES
@pytest.mark.parametrize(("heads", "rank", "rope"), [(16, 64, 16), (5, 24, 8), (1, 8, 4), (40, 40, 8)])
def test_bits_on_every_path(variant: str, dtype: DType, heads: int, rank: int, rope: int) -> None:
    length = 400
    whole = everything(dtype, heads, rank, rope, length, 64)
    right = answer(variant, 1, whole, ((0, length),))
    assert_close(right, whole.expected(), attend_bound(dtype.name))
    for block_size in (16, 128, 256):
        other = everything(dtype, heads, rank, rope, length, block_size)
        assert_bits_equal(answer(variant, 3, other, ((0, length),)), right, f"blocks of {block_size}")
    for chunk in (1, 7, 150):
        for first in range(0, length, chunk * (29 if chunk < 10 else 1)):
            last = min(first + chunk, length)
            assert_bits_equal(answer(variant, 2, whole, ((first, last),)), right[first:last], f"{first}..{last}")
    # Neighbours that begin with the same blocks, one token each, and others with many.
    runs = ((399, 400), (200, 201), (301, 303), (10, 11), (399, 400))
    expected = torch.cat([right[first:last] for first, last in runs])
    assert_bits_equal(answer(variant, 2, whole, runs), expected, "neighbours")
    runs = ((0, 300), (399, 400), (128, 256))
    expected = torch.cat([right[first:last] for first, last in runs])
    assert_bits_equal(answer(variant, 2, whole, runs), expected, "many")


@NATIVE
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=lambda d: d.name)
def test_bits_over_several_waves(variant: str, dtype: DType) -> None:
    """Deep enough that unmerged results of all splits together would not be kept: they are merged on the way."""
    length, heads = 128 * 37 + 5, 128
    problem = everything(dtype, heads, 144, 16, length, 128)
    out = problem.op.out[-3:]
    right = answer(variant, 1, problem, ((length - 60, length),))  # a run of queries goes through all its splits itself
    assert_bits_equal(answer(variant, 2, problem, ((length - 1, length),)), right[-1:], "one token")
    assert_bits_equal(
        answer(variant, 3, problem, ((length - 2, length), (length - 2, length - 1))), right[[-2, -1, -2]]
    )
    one = replace(
        problem,
        op=replace(problem.op, q=problem.op.q[-3:], out=out),
        step=step_of(((length - 3, length),), (problem.step.tables[0][0],)),
    )
    assert_close(right[-3:], one.expected(), attend_bound(dtype.name))


@NATIVE
@DTYPES
@pytest.mark.parametrize("junk", [math.inf, -math.inf, "largest"])
def test_what_is_invisible_is_not_read(variant: str, dtype: DType, junk: float | str) -> None:
    backend = NativeBackend(variant, 2)
    junk = torch.finfo(torch_dtype(dtype)).max if isinstance(junk, str) else junk
    problem = latents(6, 24, 8, dtype, 16, ((300, 7), (131, 3)))
    clean = problem.run(backend)
    assert clean.isfinite().all()
    tiles = k_tiles(problem.op.store)
    tiles.masked_fill_(tiles.isnan(), junk)
    assert bits_equal(problem.run(backend), clean)
    row = torch.full((1, 1, 32), junk)
    write_kv(problem.op.store, problem.step.tables[0][0], torch.tensor([299]), row, None)  # its last query's own
    out = problem.run(backend)
    assert bits_equal(out[:6], clean[:6]) and bits_equal(out[7:], clean[7:])
    assert not bits_equal(out[6], clean[6])


class Model:
    """Weights and inputs of one layer's latent attention, and what it must answer when everything is expanded."""

    def __init__(self, dtype: DType, heads: int, nope: int, rank: int, rope: int, value: int, length: int) -> None:
        generator = torch.Generator().manual_seed(heads + rank)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.dtype, self.heads, self.nope, self.rank, self.rope = dtype, heads, nope, rank, rope
        self.value, self.length = value, length
        self.scale = (nope + rope) ** -0.5
        self.q = random(length, heads * (nope + rope))
        self.kv = random(length, rank + rope) * 2
        self.norm = NormWeight(1 + 0.3 * random(rank), 1e-6)
        self.w_uk, self.w_uv = random(heads, nope, rank) / rank**0.5, random(heads, value, rank) / rank**0.5
        angles = torch.arange(length)[:, None] * 0.7 ** torch.arange(rope // 2)
        self.cos, self.sin = angles.cos().float(), angles.sin().float()

    def turned(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """The last ``width`` channels of float64 x [T, heads, n] rotated."""
        half = width // 2
        cos, sin = self.cos.double()[:, None, :half], self.sin.double()[:, None, :half]
        a, b = x[..., -width:-half], x[..., -half:]
        return torch.cat((x[..., :-width], a * cos - b * sin, b * cos + a * sin), -1)

    def expanded(self, fault: str = "") -> torch.Tensor:
        """float64 [T, H * value] from keys and values of every head, the textbook way."""
        c = self.kv[:, : self.rank].double()
        c = c / torch.sqrt(c.square().mean(-1, keepdim=True) + 1e-6) * self.norm.weight.double()
        k_rope = self.turned(self.kv[:, None, self.rank :].double(), self.rope)
        q = self.turned(self.q.double().view(self.length, self.heads, -1), self.rope)
        if fault == "rope through the latent":
            c = self.turned(c[:, None], self.rope)[:, 0]
        if fault == "stale rows":
            c = torch.cat((c[:20], c[:20], c[40:]))  # twenty rows expanded from what stood there before
        k = torch.einsum("tc,hnc->thn", c, self.w_uk.double())
        v = torch.einsum("tc,hvc->thv", c, self.w_uv.double())
        k_rope = k_rope.expand(-1, self.heads, -1)
        if fault == "k_R per head":
            k_rope = torch.stack([k_rope[:, h].roll(h, -1) for h in range(self.heads)], 1)
        scores = torch.einsum("ihn,jhn->hij", q, torch.cat((k, k_rope), -1)) * self.scale
        if fault == "scale of the latent":
            scores = scores / self.scale * (self.rank + self.rope) ** -0.5
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("hij,jhv->ihv", scores.softmax(-1), v).flatten(1)

    def absorbed(self, backend: Backend, chunk: int, block_size: int = 32) -> torch.Tensor:
        """The same by way of the operations: [T, H * value], tokens ``chunk`` at a time."""
        h, width = self.heads, self.rank + self.rope
        kind = torch_dtype(self.dtype)
        blocks = -(-self.length // block_size)
        data = torch.full((blocks, block_size * width), torch.nan, dtype=kind).view(torch.uint8)
        store = LayerStore(data, self.dtype, block_size, 1, width, self.rank, 0, value_in_key=True)
        uk = tuple(backend.weight(self.rank, self.nope, FLOAT32) for _ in range(h))
        uv = tuple(backend.weight(self.value, self.rank, FLOAT32) for _ in range(h))
        for head in range(h):
            uk[head].fill(0, self.w_uk[head].T)
            uv[head].fill(0, self.w_uv[head])
        found = []
        table = torch.arange(blocks, dtype=torch.int32)
        for first, last in pairwise((*range(0, self.length, chunk), self.length)):
            n = last - first
            q, kv = self.q[first:last].clone(), self.kv[first:last].clone()
            absorbed, out = torch.empty(n, h * self.rank), torch.empty(n, h * self.rank)
            q_out = torch.empty(n, h * width, dtype=torch.bfloat16 if self.dtype == BFLOAT16 else torch.float32)
            result = torch.empty(n, h * self.value)
            ops: list[Op] = [
                GroupedLinear("absorb", q, uk, absorbed, h, source_stride=self.nope + self.rope),
                AppendLatent("append", q, absorbed, kv, q_out, store, h, self.scale, self.cos, self.sin, self.norm),
                Attend("attend", q_out, out, store, h),
                GroupedLinear("values", out, uv, result, h, source_stride=self.rank),
            ]
            backend.compile(ops).run(step_of(((first, last),), (table,)))
            found.append(result)
        return torch.cat(found)

    def expanding(self, backend: Backend, chunk: int, block_size: int = 32) -> torch.Tensor:
        """The same with the latents expanded at each step: [T, H * value]."""
        h, width, kind = self.heads, self.rank + self.rope, torch_dtype(self.dtype)
        blocks = -(-self.length // block_size)
        data = torch.full((blocks, block_size * width), torch.nan, dtype=kind).view(torch.uint8)
        store = LayerStore(data, self.dtype, block_size, 1, width, self.rank, 0, value_in_key=True)
        keys = tuple(backend.weight(self.nope, self.rank, self.dtype) for _ in range(h))
        values = tuple(backend.weight(self.value, self.rank, self.dtype) for _ in range(h))
        for head in range(h):
            keys[head].fill(0, self.w_uk[head])
            values[head].fill(0, self.w_uv[head])
        found = []
        table = torch.arange(blocks, dtype=torch.int32)
        for first, last in pairwise((*range(0, self.length, chunk), self.length)):
            n = last - first
            q, kv = self.q[first:last].clone(), self.kv[first:last].clone()
            query = torch.empty(n, h * (self.nope + self.rope), dtype=kind)
            out = torch.full((n, h * self.value), torch.nan)
            ops: list[Op] = [
                AppendLatent("append", q, None, kv, query, store, h, self.scale, self.cos, self.sin, self.norm),
                AttendExpanded("attend", query, out, store, h, keys, values),
            ]
            backend.compile(ops).run(step_of(((first, last),), (table,)))
            found.append(out)
        return torch.cat(found)


@BACKENDS
@DTYPES
def test_absorbed_is_what_expansion_gives(backend: Backend, dtype: DType) -> None:
    """Latents that are never expanded answer as every head's keys and values do; and each fault in that would show."""
    model = Model(dtype, heads=6, nope=12, rank=32, rope=8, value=10, length=150)
    right = model.expanded()
    found = model.absorbed(backend, 150)
    bound = {"float32": LOGITS, "float16": 8 * 2.0**-11, "bfloat16": 4 * ATTEND_BFLOAT16}[dtype.name]
    assert_close(found, right, bound)
    assert_close(found, right, 4 * bound, measure=largest_row_error)
    for fault in ("rope through the latent", "k_R per head", "scale of the latent", "stale rows"):
        assert relative_error(found, model.expanded(fault)) > 4 * bound, fault
    if isinstance(backend, NativeBackend):
        for chunk in (1, 37, 128):
            assert_bits_equal(model.absorbed(backend, chunk), found, f"chunks of {chunk}")


@BACKENDS
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=lambda d: d.name)
@pytest.mark.parametrize(("heads", "nope", "value", "rank", "rope"), [(3, 16, 32, 24, 8), (2, 48, 16, 64, 4)])
def test_expanded_for_many_queries(
    backend: Backend, dtype: DType, heads: int, nope: int, value: int, rank: int, rope: int
) -> None:
    """Keys and values of every head from the same rows, whose unwritten slots are NaN; each query its own chain."""
    model = Model(dtype, heads, nope, rank, rope, value, length=300)
    right, found = model.expanded(), model.expanding(backend, 300)
    bound = LOGITS if dtype == FLOAT32 else 6 * ATTEND_BFLOAT16
    assert_close(found, right, bound)
    assert_close(found, right, 4 * bound, measure=largest_row_error)
    for fault in ("rope through the latent", "k_R per head", "stale rows"):
        assert relative_error(found, model.expanded(fault)) > 4 * bound, fault
    if isinstance(backend, NativeBackend):
        for chunk, block_size in ((1, 32), (37, 16), (150, 256)):
            assert_bits_equal(model.expanding(backend, chunk, block_size), found, f"chunks of {chunk}")


@BACKENDS
@DTYPES
@pytest.mark.parametrize(("heads", "nope", "rank", "rope"), [(3, 5, 24, 8), (20, 16, 40, 4), (2, 3, 8, 0)])
def test_append(backend: Backend, dtype: DType, heads: int, nope: int, rank: int, rope: int) -> None:
    """What is stored and what is asked, against the formula; no other slot is touched."""
    generator = torch.Generator().manual_seed(rank)
    count, first, block_size, width = 21, 7, 16, rank + rope
    q = torch.randn(count, heads * (nope + rope), generator=generator)
    wide = torch.randn(count, width + 3, generator=generator)
    kv, absorbed = wide[:, :width], torch.randn(count, heads * rank, generator=generator)
    norm = NormWeight(1 + 0.2 * torch.randn(rank, generator=generator), 1e-6)
    angles = torch.rand(first + count, rope // 2, generator=generator) * 6
    cos, sin = (angles.cos(), angles.sin()) if rope else (None, None)
    kind = torch_dtype(dtype)
    data = torch.full((3, block_size * width), torch.nan, dtype=kind).view(torch.uint8)
    store = LayerStore(data, dtype, block_size, 1, width, rank, 0, value_in_key=True)
    q_out = torch.full((count, heads * width), torch.nan, dtype=torch.bfloat16 if dtype == BFLOAT16 else torch.float32)
    op = AppendLatent("append", q, absorbed, kv, q_out, store, heads, 0.3, cos, sin, norm)
    table = torch.tensor([2, 0], dtype=torch.int32)
    backend.compile([op]).run(step_of(((first, first + count),), (table,)))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        if cos is None or sin is None:
            return x
        c, s = cos[first:, None].double(), sin[first:, None].double()
        a, b = x.chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    c = kv[:, :rank].double()
    c = c / torch.sqrt(c.square().mean(-1, keepdim=True) + 1e-6) * norm.weight.double()
    right = torch.cat((c[:, None], rotated(kv[:, None, rank:].double())), -1)
    rows = read_k(store, table, first, first + count)
    bound = rounding_bound(dtype.name) + POINTWISE
    assert_close(rows, right, bound)
    heads_q = q.double().view(count, heads, -1)
    right_q = torch.cat((absorbed.double().view(count, heads, rank), rotated(heads_q[..., nope:])), -1) * 0.3
    assert_close(
        q_out.view(count, heads, width), right_q, rounding_bound("bfloat16" if dtype == BFLOAT16 else "float32")
    )
    assert bits_equal(read_v(store, table, first, first + count), rows[..., :rank])
    assert read_k(store, table, 0, first).isnan().all()
    assert store.data[1].view(kind).isnan().all()


@BACKENDS
def test_refusals(backend: Backend) -> None:
    store = LayerStore(torch.zeros(2, 16 * 12 * 4, dtype=torch.uint8), FLOAT32, 16, 1, 12, 8, 0, value_in_key=True)
    qkv = Append("append", torch.zeros(1, 44), torch.zeros(1, 24), store, 2, 1.0)
    assert "takes an AppendLatent" in str(backend.refuses(qkv))
    good = AppendLatent(
        "append", torch.zeros(1, 14), torch.zeros(1, 16), torch.zeros(1, 12), torch.zeros(1, 24), store, 2, 1.0
    )
    assert backend.refuses(good) is None
    plain = replace(store, value_in_key=False)
    assert "values lie in its keys" in str(backend.refuses(replace(good, store=plain)))
    assert "do not fit" in str(backend.refuses(replace(good, absorbed=torch.zeros(1, 15))))
    assert "rotation of 6" in str(backend.refuses(replace(good, cos=torch.zeros(1, 3), sin=torch.zeros(1, 3))))
    assert "give 14 channels" in str(backend.refuses(replace(good, absorbed=None)))
    weights = tuple(backend.weight(16, 8, FLOAT32) for _ in range(2))
    expanded = AttendExpanded("attend", torch.zeros(1, 40), torch.zeros(1, 32), store, 2, weights, weights)
    assert backend.refuses(expanded) is None
    assert "do not expand 2 heads" in str(backend.refuses(replace(expanded, keys=weights[:1])))
    assert "only latent rows" in str(backend.refuses(replace(expanded, store=plain)))
    odd = tuple(backend.weight(15, 8, FLOAT32) for _ in range(2))
    assert "15 channels are not whole vectors" in str(backend.refuses(replace(expanded, keys=odd)))
    other = tuple(backend.weight(16, 8, BFLOAT16) for _ in range(2))
    assert "in float32 as stored" in str(backend.refuses(replace(expanded, values=other)))
    assert "are not (40, 32)" in str(backend.refuses(replace(expanded, out=torch.zeros(1, 30))))
    two = replace(store, num_kv_heads=2, head_dim=6)
    assert "one key for all heads" in str(
        backend.refuses(Attend("attend", torch.zeros(1, 12), torch.zeros(1, 16), two, 2))
    )
    with pytest.raises(KernelError, match="no value of its own"):
        v_tiles(store)
    with pytest.raises(KernelError, match="a key alone"):
        write_kv(store, torch.zeros(1, dtype=torch.int32), torch.arange(1), torch.zeros(1, 1, 12), torch.zeros(1, 1, 8))
