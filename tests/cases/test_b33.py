"""B33: the absorbed form has the scale of the expanded key, not of the latent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvist.base.dtypes import BFLOAT16, FLOAT32
from kvist.cache.addressing import Paged
from kvist.cache.layout import Layout
from kvist.cache.rows import Latent, rows_of
from kvist.kernels.latent import attend_absorbed, compress, expand
from kvist.kernels.native import NativeBackend, variants
from kvist.spec.model import LatentAttention
from kvist.verify.compare import assert_close
from kvist.verify.course import Course
from kvist.verify.judge import judge_logits
from kvist.verify.value import held_weights
from random_models import Kind, random_tokens, subject_of

TINY = LatentAttention(2, None, 8, 4, 4, 6, (4 + 4) ** -0.5)
RELATIVE = 1e-5  # float32, two orders of some twenty additions and one softmax
TOKENS, HIDDEN = 12, 20


def materialised(q: Tensor, q_rope: Tensor, k: Tensor, k_rope: Tensor, v: Tensor, scale: float) -> Tensor:
    full_q = torch.cat([q, q_rope], -1)
    full_k = torch.cat([k, k_rope[:, None].expand(-1, q.shape[0], -1)], -1)
    p = torch.softmax(torch.einsum("hd,jhd->hj", full_q, full_k) * scale, -1)
    return torch.einsum("hj,jhd->hd", p, v)


def test_absorbed_equals_materialised_at_every_position() -> None:
    a = TINY
    x = torch.randn(TOKENS, HIDDEN)
    w_uk, w_uv = torch.randn(a.num_heads, a.qk_nope_head_dim, 8), torch.randn(a.num_heads, a.v_head_dim, 8)
    c_kv = compress(x, torch.randn(8, HIDDEN))
    k_rope = torch.randn(TOKENS, a.qk_rope_head_dim)
    q, q_rope = torch.randn(TOKENS, 2, 4), torch.randn(TOKENS, 2, 4)
    k, v = expand(c_kv, w_uk, w_uv)
    wrong = (a.kv_lora_rank + a.qk_rope_head_dim) ** -0.5
    for p in range(TOKENS):
        seen = slice(0, p + 1)
        expected = materialised(q[p], q_rope[p], k[seen], k_rope[seen], v[seen], a.scale)
        absorbed = attend_absorbed(q[p], q_rope[p], c_kv[seen], k_rope[seen], w_uk, w_uv, a.scale)
        assert_close(absorbed, expected, RELATIVE, f"position {p}")
        if p:
            # The fault would show: with the latent's scale the outputs are far apart, except at the first token.
            off = attend_absorbed(q[p], q_rope[p], c_kv[seen], k_rope[seen], w_uk, w_uv, wrong)
            assert float((off - expected).norm() / expected.norm()) > 100 * RELATIVE


def test_one_row_per_token_not_per_head() -> None:
    deepseek = LatentAttention(128, 1536, 512, 192, 64, 256, 256**-0.5)
    assert deepseek.scale == 0.0625
    assert rows_of(deepseek) == Latent(512, 64)
    layout = Layout(rows_of(deepseek), BFLOAT16, Paged(16))
    assert layout.rows.elements_per_token == 576
    assert layout.bytes_per_token == 1152


# The same case as a whole model on the real kernels: 2 heads, latent 8, rope 4, nope 4, values of 6, 12 tokens.
MODEL = Kind(heads=2, latent=(8, 4, 4, 6, None), windows=(None,))


@pytest.mark.parametrize("path", ["one step", "token by token", "steps of five", "after a crop"])
def test_kernels_equal_the_materialised_form(path: str) -> None:
    model = subject_of(MODEL, FLOAT32, NativeBackend(variants()[0], 1))
    attention = model.spec.layers[0].attention
    assert isinstance(attention, LatentAttention) and attention.scale == TINY.scale
    tokens = random_tokens(TOKENS)
    right = judge_logits(model.spec, held_weights(model), tokens)
    course = Course(model, length=TOKENS, block_size=16)
    lane = course.lane(tokens)
    if path == "after a crop":
        course.feed([(lane, TOKENS)])
        course.back_to(lane, 3, 1)
    size = {"one step": TOKENS, "token by token": 1}.get(path, 5)
    answers: dict[int, Tensor] = {}
    while lane.table.written < TOKENS:
        at, n = lane.table.written, min(size, TOKENS - lane.table.written)
        course.feed([(lane, n)])
        answers |= dict(zip(range(at, at + n), course.rows(n, range(n)), strict=True))
    assert answers
    for position, logits in answers.items():
        assert_close(logits, right[position], RELATIVE, f"{path}, position {position}")


def test_the_pool_keeps_one_row_for_all_heads() -> None:
    model = subject_of(MODEL, FLOAT32, NativeBackend(variants()[0], 1))
    course = Course(model, length=16, block_size=16)
    assert course.pool.nbytes == 16 * (8 + 4) * 4
