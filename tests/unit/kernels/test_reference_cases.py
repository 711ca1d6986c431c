"""Cases of public bug reports, on the reference kernels: B01, B05 (partial rotary), B08, B09, B35, B53."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32
from kvist.base.errors import KernelError
from kvist.kernels.blockformat import write_kv
from kvist.kernels.reference import ReferenceBackend
from kvist.kernels.reference_attend import visible
from kvist.verify.compare import ATTEND, assert_close, bits_equal
from kvist.verify.kernels import Problem, Shape, attention_problem

FLOAT = ReferenceBackend()
DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=lambda d: d.name)


def one_hot_keys(shape: Shape) -> Problem:
    """A problem whose output spells out what was seen: all scores 0, and V of position j is the j-th unit vector."""
    length = shape.requests[0][0]
    problem = attention_problem(replace(shape, v_head_dim=length))
    problem.op.q.zero_()
    table = problem.step.tables[0][0]
    at = torch.arange(length)[(table[torch.arange(length) // shape.block_size] >= 0)]
    units = torch.eye(length)[:, None].expand(-1, shape.num_kv_heads, -1)
    write_kv(problem.op.store, table, at, torch.zeros(len(at), shape.num_kv_heads, shape.head_dim), units[at])
    return problem


def seen_by(problem: Problem) -> list[list[int]]:
    """Positions with weight, per query, of head 0; all weights must be equal."""
    width = problem.op.store.v_head_dim
    rows = []
    for row in problem.run(FLOAT)[:, :width]:
        seen = torch.nonzero(row).flatten().tolist()
        assert_close(row[seen], torch.full((len(seen),), 1 / len(seen)), ATTEND)
        rows.append(seen)
    return rows


@pytest.mark.parametrize("count", [1, 2, 5])
def test_b01_the_causal_triangle_is_anchored_at_the_last_key(count):
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=4, requests=((5, count),))
    assert seen_by(one_hot_keys(shape)) == [list(range(p + 1)) for p in range(5 - count, 5)]
    problem = attention_problem(shape)
    out = problem.run(FLOAT)
    assert_close(out, problem.expected(), ATTEND)
    if count < 5:
        assert not torch.allclose(out[0], problem.v[0][0, 0])


@pytest.mark.parametrize("window", [4, 128, 1024])
def test_b08_a_window_of_n_is_n_visible_keys_the_current_one_included(window):
    for total in (window - 1, window, window + 1, 2 * window, 2 * window + 1):
        shape = Shape(num_heads=1, num_kv_heads=1, head_dim=2, window=window, requests=((total, min(total, 3)),))
        for position, seen in zip(range(total - min(total, 3), total), seen_by(one_hot_keys(shape)), strict=True):
            assert seen == list(range(max(0, position + 1 - window), position + 1))
            assert len(seen) == min(position + 1, window)


def test_b08_counts_over_one_prefill():
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=2, window=4, requests=((10, 10),))
    assert [len(seen) for seen in seen_by(one_hot_keys(shape))] == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    problem = attention_problem(shape)
    lanes = visible(problem.op, torch.arange(10), torch.arange(10))
    assert lanes.sum(1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]


def test_b09_a_prompt_longer_than_its_window_in_one_pass():
    shape = Shape(window=4, requests=((10, 10),))
    problem = attention_problem(shape)
    before = problem.run(FLOAT)
    assert_close(before, problem.expected(), ATTEND)
    rows = torch.randn(1, 2, 16) * 100
    write_kv(problem.op.store, problem.step.tables[0][0], torch.tensor([9]), rows, rows)
    after = problem.run(FLOAT)
    assert bits_equal(after[:9], before[:9]) and not bits_equal(after[9], before[9])


@DTYPES
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (8, 1), (6, 3), (7, 7), (32, 8)])
@pytest.mark.parametrize("count", [1, 20])
def test_b35_query_heads_read_the_kv_head_of_their_group(heads, groups, count, dtype):
    shape = Shape(num_heads=heads, num_kv_heads=groups, head_dim=8, dtype=dtype, requests=((150, count),))
    problem = attention_problem(shape)
    v = torch.arange(1.0, groups + 1).view(1, groups, 1).expand(150, groups, 8)
    write_kv(problem.op.store, problem.step.tables[0][0], torch.arange(150), torch.randn(150, groups, 8), v)
    per_head = problem.run(FLOAT).view(count, heads, 8)
    expected = torch.arange(1.0, groups + 1).repeat_interleave(heads // groups)
    assert_close(per_head, expected.view(1, heads, 1).expand_as(per_head), ATTEND)


def test_b35_six_heads_over_four_are_refused():
    problem = attention_problem(Shape(num_heads=4, num_kv_heads=4))
    with pytest.raises(KernelError, match="6 query heads cannot be shared out evenly over 4"):
        FLOAT.compile([replace(problem.op, num_heads=6)])


@DTYPES
@pytest.mark.parametrize("window", [None, 3])
def test_b53_padding_rows_give_zeros_and_leave_their_neighbours_alone(dtype, window):
    """Requests of 1 and 4 tokens padded to 4 on the left, and one of padding only: padding sits at position -1."""
    solo = attention_problem(Shape(dtype=dtype, window=window, requests=((1, 1), (4, 4))))
    real = solo.run(FLOAT)
    rows = [3, 4, 5, 6, 7]  # of 12: three paddings, the first request's token, four of the second, four paddings
    q = torch.full((12, *solo.op.q.shape[1:]), torch.nan, dtype=solo.op.q.dtype)
    q[rows] = solo.op.q
    positions = torch.full((12,), -1, dtype=torch.int32)
    positions[rows] = solo.step.positions
    tables = torch.cat((solo.step.tables[0], torch.full((1, 1), -1, dtype=torch.int32)))
    starts = torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    padded = replace(
        solo,
        op=replace(solo.op, q=q, out=torch.empty(12, real.shape[1])),
        step=replace(solo.step, positions=positions, starts=starts, tables=(tables,)),
    )
    out = padded.run(FLOAT)
    assert out.isfinite().all()
    assert_close(out[rows], real, ATTEND)
    padding = [t for t in range(12) if t not in rows]
    assert bits_equal(out[padding], torch.zeros(7, real.shape[1]))
