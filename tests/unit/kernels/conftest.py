"""Small matrices: one thread is faster than two that wait for each other on a busy machine."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(fixed_state: None) -> None:
    torch.set_num_threads(1)
