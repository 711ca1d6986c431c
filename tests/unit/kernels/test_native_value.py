"""Native kernels by value, every variant of this machine: against plain attention and against the float64 reference.

Bits are the laws' business; here a kernel must be right. Everything that may not be read is NaN.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32
from kvist.base.errors import KernelError, NotResident
from kvist.kernels.blockformat import k_tiles, read_k, read_v, v_tiles, write_kv
from kvist.kernels.native import NativeBackend, variants
from kvist.kernels.ops import SPLIT, Append, Embed, Linear, NormAdd, NormWeight, Step, torch_dtype
from kvist.kernels.reference import ReferenceBackend
from kvist.verify.compare import (
    POINTWISE,
    assert_close,
    attend_bound,
    bits_equal,
    largest_row_error,
    linear_bound,
    rounding_bound,
)
from kvist.verify.kernels import Problem, Shape, attention_problem, new_store

if not variants():
    pytest.skip("the native kernels are not built", allow_module_level=True)

DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=lambda d: d.name)
WEIGHTS = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=lambda d: d.name)
JUDGE = ReferenceBackend(torch.float64)
# The best and the portable variant always; what lies between them only in the full run.
VARIANTS = pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[] if name in (variants()[0], variants()[-1]) else pytest.mark.full)
        for name in variants()
    ],
)

shapes = st.builds(
    lambda groups, per_group, **rest: Shape(num_heads=groups * per_group, num_kv_heads=groups, **rest),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 14),
    head_dim=st.sampled_from([2, 8, 30, 64]),
    v_head_dim=st.sampled_from([None, 1, 6, 16, 33]),
    dtype=st.sampled_from([FLOAT32, BFLOAT16, FLOAT16]),
    block_size=st.sampled_from([16, 32, 64, 128, 256]),
    requests=st.lists(
        st.integers(1, 400).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, min(n, 40)))), min_size=1, max_size=4
    ).map(tuple),
    window=st.none() | st.integers(1, 300),
    sinks=st.sampled_from([0, 1, 5, 130]),
    softcap=st.none() | st.just(3.0),
)


@cache
def solved(shape: Shape, seed: int) -> tuple[Problem, torch.Tensor]:
    """A problem and its answer, once for all variants."""
    problem = attention_problem(shape, seed)
    return problem, problem.expected()


def check(variant: str, shape: Shape, seed: int = 0, threads: int = 1) -> None:
    problem, expected = solved(shape, seed)
    got = problem.run(NativeBackend(variant, threads))
    bound = attend_bound(shape.dtype.name)
    assert_close(got, expected, bound, f"{shape}")
    assert_close(got, expected, 4 * bound, f"{shape}", measure=largest_row_error)


@VARIANTS
@given(shape=shapes, seed=st.integers(0, 99), threads=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_attend_any_shape(variant, shape, seed, threads):
    if sum(count for _, count in shape.requests):
        check(variant, shape, seed, threads)


@VARIANTS
@DTYPES
@pytest.mark.parametrize(("heads", "groups", "width"), [(9, 3, 64), (4, 1, 256), (16, 4, 128), (7, 7, 80), (12, 1, 16)])
def test_attend_shapes_of_real_models(variant, dtype, heads, groups, width):
    for block_size in (16, 128, 512):
        requests = ((700, 1), (513, 20), (1, 1), (70, 70))
        check(variant, Shape(heads, groups, width, None, dtype, block_size, requests, window=300), threads=2)
        check(variant, Shape(heads, groups, width, None, dtype, block_size, ((900, 2),)), threads=2)


@VARIANTS
@DTYPES
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, SPLIT - 1, SPLIT, SPLIT + 1, 3 * SPLIT + 5])
def test_attend_odd_and_even_lengths(variant, dtype, length):
    for window in (None, 1, 2, 3, 50, 51):
        check(variant, Shape(dtype=dtype, window=window, requests=((length, min(length, 2)), (length, 1))))


@VARIANTS
@DTYPES
def test_attend_over_rings(variant, dtype):
    check(variant, Shape(dtype=dtype, window=100, sinks=16, ring=128, requests=((500, 20), (90, 30), (129, 1))))
    check(variant, Shape(dtype=dtype, window=128, sinks=32, ring=160, block_size=32, requests=((1000, 1),)))


@VARIANTS
@DTYPES
@pytest.mark.parametrize("spread", [4.0, 16.0])
def test_attend_sharp_scores(variant, dtype, spread):
    problem = attention_problem(Shape(dtype=dtype, requests=((400, 7),)), spread=spread)
    bound = attend_bound(dtype.name, largest_score=8 * spread)
    assert_close(problem.run(NativeBackend(variant, 1)), problem.expected(), bound)


@VARIANTS
@DTYPES
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, "largest"])
def test_attend_does_not_read_what_is_invisible(variant, dtype, junk):
    backend = NativeBackend(variant, 1)
    junk = torch.finfo(torch_dtype(dtype)).max if junk == "largest" else junk
    problem = attention_problem(Shape(dtype=dtype, requests=((300, 6),), window=149, sinks=1))
    clean = problem.run(backend)
    store, table = problem.op.store, problem.step.tables[0][0]
    for tiles in (k_tiles(store), v_tiles(store)):
        tiles.masked_fill_(tiles.isnan(), junk)
    assert bits_equal(problem.run(backend), clean)
    rows = torch.full((1, 2, 16), junk)
    write_kv(store, table, torch.tensor([299]), rows, rows)  # seen by the last query only
    out = problem.run(backend)
    assert bits_equal(out[:-1], clean[:-1])
    assert not bits_equal(out[-1], clean[-1])


@VARIANTS
@DTYPES
def test_attend_gives_zeros_where_nothing_is_seen(variant, dtype):
    problem = attention_problem(Shape(dtype=dtype, requests=((40, 4), (3, 2))))
    positions = problem.step.positions.clone()
    positions[[0, 5]] = -1
    out = replace(problem, step=replace(problem.step, positions=positions)).run(NativeBackend(variant, 1))
    assert bits_equal(out[[0, 5]], torch.zeros(2, out.shape[1]))
    assert_close(out[1:5], problem.expected()[1:5], attend_bound(dtype.name))


@VARIANTS
@DTYPES
def test_attend_infinite_scores_take_all_the_weight_or_none(variant, dtype):
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=2, v_head_dim=1, dtype=dtype, requests=((4, 1),))
    problem = attention_problem(shape)
    problem.op.q.copy_(torch.tensor([[[3e38, 0.0]]]))
    v = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(4, 1, 1)
    for keys, expected in (([1.0, 9.0, -9.0, 9.0], 5.0), ([-9.0, 0.0, 0.0, -9.0], 3.0), ([-9.0] * 4, 3.75)):
        k = torch.tensor([[[key, 0.0]] for key in keys])
        write_kv(problem.op.store, problem.step.tables[0][0], torch.arange(4), k, v)
        assert problem.run(NativeBackend(variant, 1)).item() == expected


@VARIANTS
@DTYPES
def test_attend_does_not_hide_a_visible_nan(variant, dtype):
    backend = NativeBackend(variant, 1)
    problem = attention_problem(Shape(dtype=dtype, requests=((200, 3),)))
    problem.op.q[1, 2] = math.nan
    rows = problem.run(backend).view(3, 4, 16)
    assert rows[1, 2].isnan().all() and rows[0].isfinite().all() and rows[1, :2].isfinite().all()
    poison = torch.full((1, 2, 16), math.nan)
    write_kv(problem.op.store, problem.step.tables[0][0], torch.tensor([5]), poison, poison)
    assert problem.run(backend).isnan().all()


@VARIANTS
def test_attend_refuses_a_visible_block_that_is_not_stored(variant):
    problem = attention_problem(Shape(requests=((300, 2),), window=100))
    backend = NativeBackend(variant, 1)
    for block in (-1, 999):
        table = problem.step.tables[0].clone()
        table[0, 250 // 16] = block
        lost = replace(problem, step=replace(problem.step, tables=(table,)))
        with pytest.raises((KernelError, NotResident), match="240"):
            lost.run(backend)
    assert_close(problem.run(backend), problem.expected(), attend_bound("float32"))


@VARIANTS
@DTYPES
def test_attend_one_key_and_very_many(variant, dtype):
    backend = NativeBackend(variant, 1)
    one = attention_problem(Shape(num_heads=2, num_kv_heads=1, dtype=dtype, requests=((1, 1),)))
    assert bits_equal(one.run(backend).view(2, 16), one.v[0][0].float().expand(2, 16).contiguous())
    check(variant, Shape(num_heads=1, num_kv_heads=1, head_dim=4, dtype=dtype, block_size=128, requests=((20000, 1),)))


@VARIANTS
@WEIGHTS
def test_attend_output_in_the_act_type(variant, dtype):
    backend = NativeBackend(variant, 1)
    problem = attention_problem(Shape(dtype=dtype, requests=((200, 3),)), out_dtype=torch.bfloat16)
    assert bits_equal(
        problem.run(backend), attention_problem(Shape(dtype=dtype, requests=((200, 3),))).run(backend).bfloat16()
    )


def step_of(count: int, rows: list[int] | None = None) -> Step:
    arange = torch.arange(count, dtype=torch.int32)
    starts = torch.tensor([0, count], dtype=torch.int32)
    return Step(arange % 7, arange, starts, (), torch.tensor(rows or [], dtype=torch.int32))


def judged(op, step: Step, out: torch.Tensor) -> torch.Tensor:
    """What ``op`` must write over a copy of ``out``, in float64 from the same inputs."""
    expected = out.double()
    JUDGE.compile([replace(op, out=expected)]).run(step)
    return expected


@VARIANTS
@WEIGHTS
@pytest.mark.parametrize("epilogue", ["store", "add", "glu"])
@pytest.mark.parametrize(
    ("form", "n", "k"),
    [
        *((form, n, k) for form in ("act", "normed", "biased") for n, k in ((96, 64), (34, 18), (64, 576), (1000, 30))),
        # Not normed: rounding the input moves a single output by more than its own size when its terms cancel.
        ("act", 2, 576),
        ("biased", 2, 576),
    ],
)
def test_linear(variant, dtype, epilogue, form, n, k):
    backend, act = NativeBackend(variant, 2), torch_dtype(dtype)
    weight = backend.weight(n, k, dtype, epilogue == "glu")
    weight.fill(0, torch.randn(n, k) / math.sqrt(k))
    norm = NormWeight(torch.rand(k) + 0.5, 1e-5) if form == "normed" else None
    bias = torch.randn(n) if form == "biased" else None
    for count in (1, 2, 5, 13, 40):
        source = torch.randn(count, k) if norm else torch.randn(count, k).to(act)
        glu = epilogue == "glu"
        out = torch.randn(count, n // 2 if glu else n).to(act if glu else torch.float32)
        for activation in ("silu", "gelu_tanh") if glu else ("silu",):
            op = Linear("linear", source, weight, out.clone(), epilogue, norm, bias, activation)
            expected = judged(op, step_of(count), out)
            backend.compile([op]).run(step_of(count))
            bound = linear_bound(k)
            if norm is not None and dtype == BFLOAT16:
                bound += rounding_bound("bfloat16")
            if glu and dtype == BFLOAT16:
                bound += rounding_bound("bfloat16")
            assert_close(op.out, expected, bound)


@VARIANTS
@WEIGHTS
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_logits_of_wanted_rows(variant, dtype, softcap):
    backend = NativeBackend(variant, 1)
    weight = backend.weight(77, 32, dtype)
    weight.fill(0, torch.randn(77, 32))
    source = torch.randn(9, 32).to(torch_dtype(dtype))
    out = torch.full((9, 77), math.nan)
    op = Linear("head", source, weight, out.clone(), wanted=True, softcap=softcap)
    for rows in ([8], [5, 0, 5], []):
        op.out.copy_(out)
        expected = judged(op, step_of(9, rows), out)
        backend.compile([op]).run(step_of(9, rows))
        assert_close(op.out[: len(rows)], expected[: len(rows)], linear_bound(32))
        assert op.out[len(rows) :].isnan().all()


@VARIANTS
@WEIGHTS
def test_weights_give_their_rows_back(variant, dtype):
    backend, rows = NativeBackend(variant, 1), torch.randn(50, 24)
    for glu in (False, True):
        weight = backend.weight(50, 24, dtype, glu)
        weight.fill(7, rows[7:])
        weight.fill(0, rows[:7].bfloat16() if dtype == BFLOAT16 else rows[:7])
        ids = torch.tensor([49, 0, 25, 24, 0])
        assert bits_equal(weight.rows(ids), rows.to(torch_dtype(dtype)).float()[ids])


@VARIANTS
@WEIGHTS
def test_embed_and_norm_add(variant, dtype):
    backend = NativeBackend(variant, 2)
    weight = backend.weight(7, 36, dtype)
    weight.fill(0, torch.randn(7, 36))
    out = torch.full((12, 36), math.nan)
    embed = Embed("embed", weight, 3.7, out.clone())
    backend.compile([embed]).run(step_of(10))
    assert_close(embed.out[:10], judged(embed, step_of(10), out)[:10], POINTWISE)
    assert embed.out[10:].isnan().all()
    source, start = torch.randn(12, 36) * 3, torch.randn(12, 36)
    post = NormAdd("post", source, NormWeight(torch.rand(36), 0.1), start.clone())
    backend.compile([post]).run(step_of(10))
    assert_close(post.out, judged(post, step_of(10), start), POINTWISE)
    assert bits_equal(post.out[10:], start[10:])


@VARIANTS
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_append(variant, data):
    dtype = data.draw(st.sampled_from([FLOAT32, BFLOAT16, FLOAT16]))
    G, per_group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    D, Dv = data.draw(st.sampled_from([4, 10, 64])), data.draw(st.sampled_from([3, 8, 64]))
    half = data.draw(st.none() | st.integers(1, D // 2))
    norms = [NormWeight(torch.rand(D) + 0.5, 1e-3) for _ in "qk"] if data.draw(st.booleans()) else [None, None]
    counts = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3).filter(any))
    H, count, B = G * per_group, sum(counts), len(counts)
    table = torch.randperm(3 * B).view(B, 3).to(torch.int32)
    positions = []
    for c in counts:
        start = data.draw(st.integers(0, 48 - c))
        positions += range(start, start + c)
    cos, sin = (None, None) if half is None else (torch.randn(48, half), torch.randn(48, half))
    qkv = torch.randn(count, (H + G) * D + G * Dv)
    q_type = torch.bfloat16 if dtype == BFLOAT16 else torch.float32
    step = Step(
        torch.zeros(count, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        (torch.empty(0, 0, dtype=torch.int32), table),
        torch.empty(0, dtype=torch.int32),
    )
    shape = Shape(num_kv_heads=G, head_dim=D, v_head_dim=Dv, dtype=dtype)
    exact = replace(shape, dtype=FLOAT32)
    op = Append(
        "append", qkv, torch.empty(count, H, D, dtype=q_type), new_store(shape, 3 * B, 1), H, 0.35, cos, sin, *norms
    )
    NativeBackend(variant, 1).compile([op]).run(step)
    judge = replace(op, q_out=torch.empty(count, H, D, dtype=torch.float64), store=new_store(exact, 3 * B, 1))
    JUDGE.compile([judge]).run(step)
    assert_close(op.q_out, judge.q_out, rounding_bound("bfloat16") if dtype == BFLOAT16 else POINTWISE)
    for b in range(B):
        written = positions[int(step.starts[b]) : int(step.starts[b + 1])]
        if written:
            at = written[0], written[-1] + 1
            assert_close(
                read_k(op.store, table[b], *at), read_k(judge.store, table[b], *at), rounding_bound(dtype.name)
            )
            v = read_v(judge.store, table[b], *at).to(torch_dtype(dtype))
            assert bits_equal(read_v(op.store, table[b], *at), v)
    elements = op.store.data.view(torch_dtype(dtype))
    assert int(elements.isnan().sum()) == elements.numel() - count * G * (D + Dv)


@VARIANTS
def test_buffers_of_a_type_outside_the_contract_are_refused(variant):
    """A kernel takes raw addresses: read as another type, a buffer would be garbage, or end too early."""
    backend = NativeBackend(variant, 1)
    single, half = torch.float32, torch.bfloat16
    for dtype, source, out, epilogue, norm in (
        (BFLOAT16, half, single, "glu", False),  # the gate's output goes into a product: its source's type
        (FLOAT32, half, single, "store", False),
        (FLOAT32, half, single, "store", True),
        (BFLOAT16, half, half, "store", False),
        (BFLOAT16, torch.float64, single, "store", False),
    ):
        weight = backend.weight(32, 32, dtype, epilogue == "glu")
        width = 16 if epilogue == "glu" else 32
        given_norm = NormWeight(torch.ones(32), 1e-5) if norm else None
        op = Linear(
            "o", torch.zeros(1, 32, dtype=source), weight, torch.zeros(1, width, dtype=out), epilogue, given_norm
        )
        assert backend.refuses(op), op
    problem = attention_problem(Shape(dtype=BFLOAT16))
    for change in ({"q": problem.op.q.float()}, {"out": problem.op.out.double()}):
        assert backend.refuses(replace(problem.op, **change)), change
    with pytest.raises(KernelError):
        backend.compile([replace(problem.op, num_heads=3)])


@VARIANTS
def test_buffers_of_another_width_are_refused(variant):
    backend = NativeBackend(variant, 1)
    weight = backend.weight(32, 32, FLOAT32)
    for source, out in ((16, 32), (32, 16)):
        assert backend.refuses(Linear("o", torch.zeros(1, source), weight, torch.zeros(1, out)))
    assert backend.refuses(Embed("embed", weight, 1.0, torch.zeros(1, 16)))
    problem = attention_problem(Shape())
    assert backend.refuses(replace(problem.op, q=problem.op.q[:, :2].contiguous()))
    assert backend.refuses(replace(problem.op, out=problem.op.out[:, :32].contiguous()))
