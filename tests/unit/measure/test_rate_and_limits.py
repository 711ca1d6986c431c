from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from time import perf_counter

import pytest
import torch

from kvist.base.dtypes import BFLOAT16
from kvist.base.errors import UsageError
from kvist.cache.layout import groups_of
from kvist.kernels.dispatch import best_backend
from kvist.kernels.reference import ReferenceBackend
from kvist.measure.attention import AttentionBench, Shape, attention_rates, shapes
from kvist.measure.limits import Work, product_rate, read_bandwidth, visible_pairs
from kvist.measure.rate import rate, repeat
from random_models import KINDS, spec_of


class Ticks:
    """A clock that an action moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rate_is_the_middle_with_its_extremes() -> None:
    found = rate([3.0, 1.0, 8.0], limit=6.0)
    assert (found.median, found.lowest, found.highest, found.repeats, found.of_limit) == (3.0, 1.0, 8.0, 3, 0.5)
    assert rate([2.0]).of_limit is None
    with pytest.raises(UsageError):
        rate([])


def test_repeat_divides_by_the_clock_and_leaves_the_first_run_out() -> None:
    clock, runs = Ticks(), []

    def action() -> None:
        clock.now += 5.0 if not runs else 0.5
        runs.append(clock.now)

    # 12 per run; the first run is slow, so that one call fills a repeat.
    assert repeat(action, 12, clock, 3, seconds=1.0) == [24.0, 24.0, 24.0]
    assert len(runs) == 4


def test_visible_pairs_are_counted_as_a_loop_does() -> None:
    for tokens in (1, 5, 17):
        for window in (None, 1, 4, 17, 30):
            expected = sum(min(p + 1, window or p + 1) for p in range(tokens))
            assert visible_pairs(tokens, window) == expected


def test_bytes_of_a_step_by_hand() -> None:
    spec = spec_of(replace(KINDS["windows"], windows=(40, None)))
    work = Work(spec, groups_of(spec, BFLOAT16, 16), 10_000, BFLOAT16)
    row = 2 * (16 + 16) * 2  # 2 kv heads, keys and values of 16, two bytes
    assert work.step_bytes([30]) == 10_000 + 30 * row * 2
    assert work.step_bytes([100]) == 10_000 + 40 * row + 100 * row
    assert work.step_bytes([100, 100]) == 10_000 + 2 * (40 + 100) * row
    # One prefix of 30 tokens of both is read once; nothing is shared by a request alone.
    assert work.step_bytes([100, 100], shared=30) == 10_000 + 2 * (40 + 100) * row - 2 * 30 * row
    assert work.step_bytes([100], shared=30) == work.step_bytes([100])
    # Separate embeddings are looked up, not read.
    apart = replace(work, spec=replace(spec, tied_embeddings=False))
    assert apart.step_bytes([30]) == work.step_bytes([30]) - (spec.vocab_size - 1) * spec.hidden_size * 2


def test_operations_of_a_prefill_by_hand() -> None:
    spec = spec_of(replace(KINDS["grouped"], windows=(None,)))
    work = Work(spec, groups_of(spec, BFLOAT16, 16), 0, BFLOAT16)
    matrices = 48 * (4 + 2 + 2) * 16 + 4 * 16 * 48 + 3 * 48 * 80  # q, k and v; o; gate, up and down
    attention = 4 * (16 + 16) * (3 + 2 + 1)
    assert work.prefill_operations(3) == 2 * (3 * matrices + attention + spec.vocab_size * 48)


def test_a_step_reads_one_row_for_all_heads_and_the_chosen_experts() -> None:
    spec = spec_of(KINDS["latents and experts"])
    work = Work(spec, groups_of(spec, BFLOAT16, 16), 1_000_000, BFLOAT16)
    idle = 2 * (12 - 4) * 3 * 16 * 48  # on two layers, 8 of 12 experts: three matrices of 16 x 48 each
    assert work.read_weights == 1_000_000 - idle * 2
    assert work.step_bytes([100]) == work.read_weights + 3 * 100 * (16 + 8) * 2


def test_operations_of_latents_and_experts_by_hand() -> None:
    spec = spec_of(KINDS["latents and experts"])
    work = Work(spec, groups_of(spec, BFLOAT16, 16), 0, BFLOAT16)
    heads, hidden = 16, 48
    down, up = (20 + 16 + 8) * hidden, 20 * heads * (8 + 8)  # to the latents; queries up from theirs
    absorbed = heads * (8 + 8) * 16 + heads * 8 * hidden  # through W_UK and W_UV of each head; o
    dense, mixture = 3 * 80 * hidden, (3 * (4 * 16 + 20) + 12) * hidden
    matrices = 3 * (down + up + absorbed) + dense + 2 * mixture
    pairs = 3 * heads * ((16 + 8) + 16) * (3 + 2 + 1)
    assert work.prefill_operations(3) == 2 * (3 * matrices + pairs + spec.vocab_size * hidden)


def test_a_latent_is_read_once_and_serves_twice() -> None:
    spec = spec_of(KINDS["latents"])
    (shape,) = shapes(spec, BFLOAT16, everything=False)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.v_head_dim, shape.latent) == (4, 1, 32, 24, True)
    assert shape.nbytes == shape.depth * 32 * 2
    ops, step = AttentionBench(best_backend(1), nbytes=1 << 20).operations(replace(shape, depth=200))
    assert best_backend(1).refuses(ops[0]) is None
    best_backend(1).compile(list(ops)).run(step)
    assert torch.isfinite(ops[-1].out).all() and ops[-1].out.abs().max() > 0


def test_the_limit_of_many_heads_over_a_latent_is_the_product() -> None:
    """128 heads do 2 x 128 x (576 + 512) operations for the 1,152 bytes of a row: memory is not what holds them up."""
    latent = Shape(BFLOAT16, 128, 1, 576, 512, 64, latent=True)
    heads = Shape(BFLOAT16, 4, 4, 64, 64, 64)
    assert latent.operations / latent.nbytes == 2 * 128 * (576 + 512) / (576 * 2)
    found = attention_rates(best_backend(1), [latent, heads], 1000.0, perf_counter, 1, flops=1e12)
    limits = [shape.rate.limit for shape in found]
    assert limits == [1000.0 * 576 * 2 / (2 * 128 * (576 + 512)), 1000.0]


def test_reading_and_products_are_measured_on_any_backend() -> None:
    for backend in (best_backend(2), ReferenceBackend()):
        found = read_bandwidth(backend, (1, 2), perf_counter, 1)
        assert [(r.source, r.threads) for r in found] == [("ram", 1), ("cache", 1), ("ram", 2), ("cache", 2)]
        assert all(r.rate.median > 1e-3 and r.nbytes > 0 for r in found)
    assert product_rate(best_backend(1), BFLOAT16, perf_counter, 1, size=64) > 0


def test_attention_layers_lie_apart_and_answer_alike() -> None:
    """The working set holds as many layers as were asked for, none of them on another's bytes."""
    shape = Shape(BFLOAT16, 6, 2, 32, 32, 200)
    bench = AttentionBench(best_backend(1), nbytes=1 << 20)
    ops, step = bench.operations(shape)
    stores = [op.store for op in ops]
    # Blocks of 64 give 256 places for 200 tokens; only the tokens' bytes count as read.
    assert len(ops) * shape.nbytes == (1 << 20) * 200 // 256
    ends = sorted((s.data.data_ptr(), s.data.data_ptr() + s.data.numel()) for s in stores)
    assert all(a[1] <= b[0] for a, b in pairwise(ends))
    assert all(s.data.data_ptr() % 64 == 0 for s in stores)
    best_backend(1).compile(list(ops)).run(step)
    assert torch.isfinite(ops[-1].out).all() and ops[-1].out.abs().max() > 0


def test_shapes_hold_the_matrix_of_the_targets() -> None:
    spec = spec_of(KINDS["grouped"])
    assert [(s.heads, s.kv_heads, s.head_dim) for s in shapes(spec, BFLOAT16, everything=False)] == [(4, 2, 16)]
    found = {(s.dtype.name, s.heads // s.kv_heads, s.head_dim) for s in shapes(spec, BFLOAT16, everything=True)}
    for dtype in ("bfloat16", "float16", "float32"):
        for group in (1, 3, 4, 8):
            for width in (64, 128, 256):
                assert (dtype, group, width) in found
