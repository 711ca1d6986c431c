"""Reference attention against the plain judge: heads, offsets, windows, sinks, splits, ragged batches, poison."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32
from kvist.base.errors import KernelError, NotResident
from kvist.kernels.blockformat import k_tiles, v_tiles, write_kv
from kvist.kernels.ops import SPLIT, torch_dtype
from kvist.kernels.reference import ReferenceBackend
from kvist.verify.compare import JUDGE, assert_close, attend_bound, bits_equal, rounding_bound
from kvist.verify.kernels import Problem, Shape, attention_problem

DTYPES = [FLOAT32, BFLOAT16, FLOAT16]
FLOAT = ReferenceBackend()
DOUBLE = ReferenceBackend(torch.float64)

shapes = st.builds(
    lambda groups, per_group, **rest: Shape(num_heads=groups * per_group, num_kv_heads=groups, **rest),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 8, 16]),
    v_head_dim=st.sampled_from([None, 1, 6]),
    dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from([16, 32, 128, 256]),
    requests=st.lists(
        st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, min(n, 24)))), min_size=1, max_size=4
    ).map(tuple),
    window=st.none() | st.integers(1, 300),
    sinks=st.sampled_from([0, 1, 5, 130]),
    softcap=st.none() | st.just(3.0),
)


def check(shape: Shape, seed: int = 0) -> Problem:
    problem = attention_problem(shape, seed)
    expected = problem.expected()
    assert_close(problem.run(FLOAT), expected, attend_bound(shape.dtype.name), f"{shape}")
    exact = attention_problem(shape, seed, out_dtype=torch.float64)
    assert_close(exact.run(DOUBLE), expected, JUDGE, f"float64 {shape}")
    return problem


@given(shape=shapes, seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_any_shape_equals_plain_attention(shape, seed):
    if sum(count for _, count in shape.requests):
        check(shape, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("length", [SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, 3 * SPLIT + 5])
def test_whole_and_partial_splits_at_every_border(dtype, length):
    check(Shape(dtype=dtype, block_size=16, requests=((length, 3), (length, 1))))


@pytest.mark.parametrize("spread", [4.0, 16.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_sharp_scores(dtype, spread):
    problem = attention_problem(Shape(dtype=dtype, requests=((400, 7),)), spread=spread)
    assert_close(problem.run(FLOAT), problem.expected(), attend_bound(dtype.name, largest_score=8 * spread))


def test_a_ring_holds_what_its_window_sees():
    check(Shape(window=100, sinks=16, ring=128, requests=((500, 20), (90, 30), (129, 1))))
    check(Shape(window=128, sinks=32, ring=160, block_size=32, requests=((1000, 1),)))


def test_output_is_rounded_once_to_its_buffer():
    problem = attention_problem(Shape(dtype=BFLOAT16), out_dtype=torch.bfloat16)
    full = replace(problem.op, out=torch.empty(problem.op.out.shape))
    FLOAT.compile([full]).run(problem.step)
    assert bits_equal(problem.run(FLOAT), full.out.bfloat16())
    bound = attend_bound("bfloat16") + rounding_bound("bfloat16")
    assert_close(problem.run(FLOAT), problem.expected(), bound)


def test_bfloat16_probabilities_are_rounded_in_float32_and_not_in_the_judge():
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=2, dtype=BFLOAT16, requests=((2, 1),))
    problem = attention_problem(shape, out_dtype=torch.float64)
    problem.op.q.copy_(torch.tensor([[[1.0, 0.0]]]))
    k, v = torch.tensor([[[0.0, 0.0]], [[-1.0, 0.0]]]), torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    write_kv(problem.op.store, problem.step.tables[0][0], torch.arange(2), k, v)
    p = float(torch.tensor(-1.0).exp().bfloat16())  # exp(-1) between two bfloat16 numbers
    assert torch.allclose(problem.run(FLOAT), torch.tensor([[1.0, p]]).double() / (1 + p), rtol=1e-6, atol=0)
    exact = torch.tensor([[1.0, torch.tensor(-1.0).double().exp()]]).double()
    assert_close(problem.run(DOUBLE), exact / exact.sum(), JUDGE)


def test_queries_that_see_nothing_give_zeros():
    problem = attention_problem(Shape(requests=((40, 4), (3, 2))))
    positions = problem.step.positions.clone()
    positions[1], positions[5] = -1, -1  # padding rows
    out = replace(problem, step=replace(problem.step, positions=positions)).run(FLOAT)
    assert bits_equal(out[[1, 5]], torch.zeros(2, out.shape[1]))
    keep = [0, 2, 3, 4]
    assert_close(out[keep], problem.expected()[keep], attend_bound("float32"))
    blind = replace(problem, op=replace(problem.op, window=0))
    assert bits_equal(blind.run(FLOAT), torch.zeros_like(out))


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), "largest"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_what_lies_at_invisible_positions_does_not_matter(dtype, junk):
    shape = Shape(dtype=dtype, requests=((300, 6),), window=150)
    junk = torch.finfo(torch_dtype(dtype)).max if junk == "largest" else junk
    problem = attention_problem(shape)
    clean = problem.run(FLOAT)
    store, table = problem.op.store, problem.step.tables[0][0]
    for tiles in (k_tiles(store), v_tiles(store)):  # poison of another kind where poison was
        tiles.masked_fill_(tiles.isnan(), junk)
    assert bits_equal(problem.run(FLOAT), clean)
    # The last key is seen by the last query only. (By value: the rows around it decide how torch multiplies.)
    rows = torch.full((1, 2, 16), junk)
    write_kv(store, table, torch.tensor([299]), rows, rows)
    out = problem.run(FLOAT)
    assert_close(out[:-1], clean[:-1], attend_bound(dtype.name))
    assert not bits_equal(out[-1], clean[-1])


def test_infinite_scores_take_all_the_weight_or_none():
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=2, v_head_dim=1, requests=((4, 1),))
    problem = attention_problem(shape)
    problem.op.q.copy_(torch.tensor([[[3e38, 0.0]]]))
    v = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(4, 1, 1)
    table = problem.step.tables[0][0]
    for keys, expected in (
        ([1.0, 9.0, -9.0, 9.0], 5.0),  # inf twice
        ([-9.0, 0.0, 0.0, -9.0], 3.0),  # -inf twice
        ([-9.0, -9.0, -9.0, -9.0], 3.75),  # nothing but -inf
    ):
        k = torch.tensor([[[key, 0.0]] for key in keys])
        write_kv(problem.op.store, table, torch.arange(4), k, v)
        assert problem.run(FLOAT).item() == expected


def test_a_visible_nan_is_not_hidden():
    problem = attention_problem(Shape(requests=((200, 3),)))
    rows = torch.full((1, 2, 16), torch.nan)
    write_kv(problem.op.store, problem.step.tables[0][0], torch.tensor([5]), rows, rows)
    assert problem.run(FLOAT).isnan().all()


def test_one_key_gives_its_value():
    problem = attention_problem(Shape(requests=((1, 1),), num_heads=2, num_kv_heads=1))
    assert bits_equal(problem.run(FLOAT).view(2, 16), problem.v[0][0].expand(2, 16).contiguous())


def test_many_keys():
    problem = attention_problem(Shape(num_heads=1, num_kv_heads=1, head_dim=4, block_size=128, requests=((20000, 1),)))
    assert_close(problem.run(FLOAT), problem.expected(), attend_bound("float32"))


def test_a_visible_block_that_was_given_back_is_an_error():
    problem = attention_problem(Shape(requests=((300, 2),), window=100))
    table = problem.step.tables[0].clone()
    table[0, 250 // 16] = -1
    lost = replace(problem, step=replace(problem.step, tables=(table,)))
    with pytest.raises(NotResident, match="position 240 is visible"):
        lost.run(FLOAT)


@pytest.mark.parametrize(("heads", "groups"), [(6, 4), (1, 2), (0, 1)])
def test_heads_that_do_not_divide_are_refused(heads, groups):
    problem = attention_problem(Shape(num_heads=groups, num_kv_heads=groups))
    with pytest.raises(KernelError, match=f"attend: {heads} query heads cannot .* {groups} kv heads"):
        FLOAT.compile([replace(problem.op, num_heads=heads)])
