"""B53: rows that see nothing. There is no padding to mask: a short request is short, and every query sees itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from kvist.base.errors import UsageError
from kvist.cache.layout import Group
from kvist.engine.request import Sampling
from kvist.kernels.blockformat import read_k, read_v
from kvist.kernels.native import NativeBackend
from kvist.kernels.ops import Backend
from kvist.kernels.reference import ReferenceBackend
from kvist.model.decoder import layer_store
from kvist.verify.compare import assert_bits_equal
from kvist.verify.course import Course, Lane
from random_models import Kind, random_tokens, subject_of
from reading_decoder import World

LENGTHS = (1, 4, 130)


def course(backend: Backend, kv_dtype: DType, window: int | None) -> Course:
    model = subject_of(Kind(windows=(None, window)), FLOAT32, backend)
    # Pools of a course are poisoned: what nobody wrote is NaN, and a lane that is not masked shows.
    return Course(replace(model, kv_dtype=kv_dtype), length=160, lanes=3, block_size=16, step_tokens=160)


@pytest.mark.parametrize("window", [None, 2, 40])
@pytest.mark.parametrize("kv_dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("backend", [NativeBackend(None, 1), ReferenceBackend()], ids=lambda backend: backend.name)
def test_unequal_rows_are_finite_and_equal_their_solo_runs(
    backend: Backend, kv_dtype: DType, window: int | None
) -> None:
    together = course(backend, kv_dtype, window)
    lanes = [together.lane(random_tokens(n, seed=n)) for n in LENGTHS]
    total = sum(LENGTHS)
    together.feed([(lane, len(lane.tokens)) for lane in lanes], keep=False)
    logits = torch.cat([together.rows(total, range(at, min(total, at + 32))) for at in range(0, total, 32)])
    assert logits.isfinite().all()
    start = 0
    for lane in lanes:
        alone = course(backend, kv_dtype, window)
        own = alone.lane(lane.tokens)
        n = len(lane.tokens)
        alone.feed([(own, n)], keep=False)
        solo = torch.cat([alone.rows(n, range(at, min(n, at + 32))) for at in range(0, n, 32)])
        if backend.name != "reference":  # which promises values, not bits
            assert_bits_equal(logits[start : start + n], solo, f"{n} tokens")
        assert (logits[start : start + n].argmax(-1) == solo.argmax(-1)).all()
        start += n
        assert_stored_rows_are_finite(together, lane)


def assert_stored_rows_are_finite(course: Course, lane: Lane) -> None:
    """Of the newest row and of all that are still there; behind it stands the poison that nobody may have read."""
    last = len(lane.tokens) - 1
    for layer in (0, 1):
        store = layer_store(course.pool, layer)
        table = torch.tensor(lane.table.entries(course.pool.group_of(layer).index), dtype=torch.int32)
        for read in (read_k, read_v):
            assert read(store, table, last, last + 1).isfinite().all()
        if (last + 1) % 16:
            assert read_k(store, table, last + 1, last + 2).isnan().all()


def test_what_would_see_nothing_cannot_be_made() -> None:
    """No window without keys, no request without tokens: there is no row over which a softmax had nothing to sum."""
    layout = World().groups[0].layout
    for window in (0, -1):
        with pytest.raises(UsageError, match="sees nothing"):
            Group(0, (0,), layout, window)
    with pytest.raises(UsageError, match="holds no token"):
        World().engine.submit([], Sampling())
