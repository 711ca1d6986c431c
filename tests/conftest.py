"""What holds for every test: fixed seeds, no network, few threads, and NaN in every block that nobody wrote."""

from __future__ import annotations

import functools
import os
import random
import signal
import socket
from collections.abc import Iterator
from typing import Any

# Read by the libraries when they are imported, and inherited by the commands that tests start.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
)

import hypothesis
import numpy as np
import pytest
import torch

from kvist.cache.pool import Pool

# A suite that was started in the background ignores Ctrl-C, and every command that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

THREADS = min(2, os.cpu_count() or 1)
LOOPBACK = ("127.", "::1", "localhost")

# Law tests must fail for everyone or for no one: examples are derived from the test, not from the clock.
hypothesis.settings.register_profile("kvist", derandomize=True, deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.load_profile("kvist")


@pytest.fixture(autouse=True)
def fixed_state() -> Iterator[None]:
    """Every test starts from the same seeds and thread count, whatever ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """A connection that leaves the machine is an error that names its target."""
    patch = pytest.MonkeyPatch()
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if self.family in {socket.AF_INET, socket.AF_INET6} and not str(address[0]).startswith(LOOPBACK):
            raise AssertionError(f"a test tried to reach {address}")
        connect(self, address)

    patch.setattr(socket.socket, "connect", local_only)
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def poisoned_pools() -> Iterator[None]:
    """Fresh and freed blocks hold NaN, so that reading what nobody wrote shows in the result."""
    patch = pytest.MonkeyPatch()
    original = Pool.__init__

    @functools.wraps(original)
    def poisoned(self: Pool, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "poison": True})

    patch.setattr(Pool, "__init__", poisoned)
    yield
    patch.undo()
