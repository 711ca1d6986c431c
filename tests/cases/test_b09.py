"""B09: a prompt longer than the window in one pass; no row may lose keys that later tokens push out."""

from __future__ import annotations

import pytest
import torch

from kvist.base.errors import TooLong
from kvist.kernels.dispatch import best_backend
from kvist.kernels.ops import Backend
from kvist.kernels.reference import ReferenceBackend
from kvist.layer import LayerCache
from kvist.verify.compare import assert_bits_equal, assert_close, attend_bound


@pytest.fixture(params={b.name: b for b in (ReferenceBackend(), best_backend())}.values(), ids=lambda b: b.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


def cache(backend: Backend, addressing: str, window: int = 4, chunk: int = 10) -> LayerCache:
    settings: dict[str, object] = {"capacity": window} if addressing == "ring" else {"capacity": 4000, "window": window}
    return LayerCache(1, 4, addressing=addressing, chunk=chunk, backend=backend, poison=True, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("addressing", ["paged", "ring"])
@pytest.mark.parametrize(("window", "tokens"), [(4, 10), (128, 345)])
def test_single_pass_equals_the_windowed_mask(backend: Backend, addressing: str, window: int, tokens: int) -> None:
    c = cache(backend, addressing, window, tokens)
    k, v, q = torch.randn(tokens, 1, 4), torch.randn(tokens, 1, 4), torch.randn(tokens, 1, 4)
    c.append(k, v)
    out = c.attend(q)
    assert out.isfinite().all()
    for i in range(tokens):
        seen = slice(max(0, i + 1 - window), i + 1)
        weights = torch.softmax(k[seen, 0].double() @ q[i, 0].double() / 2, 0)
        assert_close(out[i, 0], weights @ v[seen, 0].double(), attend_bound("float32"), f"row {i}")
    assert c.positions == list(range(tokens - window, tokens))
    assert torch.equal(c.retrieve_k(0), k[tokens - window :, 0])


@pytest.mark.parametrize("addressing", ["paged", "ring"])
def test_the_last_token_changes_no_earlier_row(backend: Backend, addressing: str) -> None:
    k, v, q = torch.randn(10, 1, 4), torch.randn(10, 1, 4), torch.randn(10, 1, 4)
    outs = []
    for change in (0.0, 5.0):
        c = cache(backend, addressing)
        last = torch.zeros(10, 1, 1)
        last[9] = change
        c.append(k + last, v + last)
        outs.append(c.attend(q))
    assert_bits_equal(outs[0][:9], outs[1][:9])
    assert not torch.equal(outs[0][9], outs[1][9])


@pytest.mark.parametrize("addressing", ["paged", "ring"])
def test_more_than_there_is_room_for_is_refused_with_advice(backend: Backend, addressing: str) -> None:
    c = cache(backend, addressing, 1024, chunk=512)
    with pytest.raises(TooLong, match=r"1377 tokens at once exceed the 512.*window of 1024: append at most chunk=512"):
        c.append(torch.zeros(1377, 1, 4), torch.zeros(1377, 1, 4))
    assert c.seen == 0
