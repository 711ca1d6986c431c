"""The guards that every other test relies on do guard."""

from __future__ import annotations

import socket

import pytest
import torch

from kvist.base.dtypes import FLOAT32
from kvist.cache.addressing import Paged
from kvist.cache.layout import Group, Layout
from kvist.cache.pool import Pool
from kvist.cache.rows import KeyValue


def test_pools_are_poisoned_when_fresh_and_when_freed() -> None:
    group = Group(0, (0,), Layout(KeyValue(1, 4, 4), FLOAT32, Paged(16)))
    pool = Pool((group,), (2,))
    bytes_ = pool.data(0).view(torch.float32)
    assert bytes_.isnan().all()
    (block,) = pool.blocks[0].reserve(1)
    bytes_[block] = 1.0
    pool.blocks[0].release([block])
    assert bytes_.isnan().all()


def test_the_network_is_out_of_reach() -> None:
    with socket.socket() as connection, pytest.raises(AssertionError, match=r"192\.0\.2\.1"):
        connection.connect(("192.0.2.1", 80))


def test_loopback_is_not_blocked() -> None:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect(server.getsockname())


@pytest.mark.parametrize("_", range(2))
def test_seeds_are_the_same_for_every_test(_: int) -> None:
    assert torch.rand(1).item() == pytest.approx(0.49625658988952637, abs=0.0)
