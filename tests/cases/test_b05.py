"""B05: channels that were never rotary stay as they are, whatever falls out of a ring; nothing is rotated again."""

from __future__ import annotations

import pytest
import torch

from kvist.base.dtypes import FLOAT32
from kvist.kernels.blockformat import read_k
from kvist.kernels.dispatch import best_backend
from kvist.model.decoder import layer_store
from kvist.spec.bounded import bounded
from kvist.spec.model import Attention
from kvist.spec.rope import inverse_frequencies
from kvist.verify.compare import PATHS, assert_bits_equal, assert_close
from kvist.verify.course import Course
from random_models import KINDS, Kind, subject_of

LENGTH, WINDOW, SINKS = 200, 24, 3


@pytest.mark.parametrize(("head_dim", "rotary"), [(8, 4), (80, 32)])
def test_a_ring_moves_no_key(head_dim: int, rotary: int) -> None:
    kind = Kind(head_dim=head_dim, v_head_dim=head_dim, rotary=rotary, windows=(None,))
    model = subject_of(kind, FLOAT32, best_backend(2))
    plain = model.spec.layers[0].attention
    assert isinstance(plain, Attention) and plain.rope is not None and plain.rope.rotary_dim == rotary
    token = [7] * LENGTH  # one token everywhere: before rotation every key of the first layer is the same
    spec = bounded(model.spec, WINDOW, SINKS)
    course = Course(model, length=LENGTH, block_size=16, step_tokens=16, spec=spec, ring_chunk=16)
    assert course.groups[0].ring is not None
    lane = course.lane(token)
    course.run(lane, LENGTH, 16, keep=False)
    assert lane.dropped > 0
    kept = [*range(SINKS), *range(LENGTH - WINDOW, LENGTH)]
    store, table = layer_store(course.pool, 0), torch.tensor(lane.table.entries(0), dtype=torch.int32)
    keys = torch.cat([read_k(store, table, p, p + 1) for p in kept])  # [kept, G, D]
    raw = keys[0]  # position 0 is not rotated
    for index, position in enumerate(kept):
        assert_bits_equal(keys[index][:, rotary:], raw[:, rotary:], f"position {position}, channels beyond {rotary}")
        assert_close(keys[index][:, :rotary], turned(raw[:, :rotary], plain, position), PATHS, f"position {position}")
    assert not torch.equal(keys[-1][:, :rotary], raw[:, :rotary])


def turned(x: torch.Tensor, attention: Attention, position: int) -> torch.Tensor:
    """RoPE of x [G, rotary] at ``position``, as complex numbers."""
    assert attention.rope is not None
    half = attention.rope.rotary_dim // 2
    angle = torch.tensor(inverse_frequencies(attention.rope), dtype=torch.float64) * position
    z = torch.complex(x[:, :half].double(), x[:, half:].double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)


def test_a_kind_with_partial_rotation_is_under_the_laws() -> None:
    assert any(kind.rotary not in (None, 0) for kind in KINDS.values())
