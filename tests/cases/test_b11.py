"""B11: in a hybrid model the length is the request's, whatever layer comes first and however small its window."""

from __future__ import annotations

import pytest

from kvist.base.dtypes import FLOAT32
from kvist.cache.blocks import BlockPool
from kvist.cache.check import check
from kvist.cache.layout import groups_of
from kvist.cache.table import Table
from kvist.spec.model import Attention, FeedForward, LayerSpec, ModelSpec, Norm

W = 4


def hybrid(order: str) -> ModelSpec:
    norm = Norm("rms", 1e-6)
    layers = tuple(
        LayerSpec(Attention(2, 1, 8, 8, 0.35, W if kind == "S" else None), FeedForward(16, "silu"), norm)
        for kind in order
    )
    return ModelSpec("Tiny", "gemma3", 16, 32, layers, norm, 64, True, "float32")


@pytest.mark.parametrize("order", ["SF", "FS", "SSSSSF", "SS"])
def test_length_and_next_position_in_every_order(order: str) -> None:
    groups = groups_of(hybrid(order), FLOAT32, 4)
    pools = [BlockPool(16) for _ in groups]
    table = Table(groups, pools)
    for total, chunk in ((10, 10), (11, 1), (14, 3)):
        table.extend(chunk)
        table.commit(chunk)
        assert table.written == table.length == total
        for group in groups:
            needed = {p for q in range(total - chunk, total) for p in range(group.first_needed(q), q + 1)}
            width = min(total, W - 1 + chunk) if group.window else total
            assert len(needed) == width
            # All that the step's queries see is in the table, in every group.
            assert all(table.entries(group.index)[p // 4] >= 0 for p in needed)
        table.give_back()
        check(groups, pools, [table])
    assert [table.resident(g.index) == 14 for g in groups] == [g.window is None for g in groups]


def test_the_models_window_is_not_the_users_context() -> None:
    groups = groups_of(hybrid("SF"), FLOAT32, 4)
    assert [g.window for g in groups] == [W, None]
    assert [g.blocks_for(40, 8) for g in groups] == [4, 10]
