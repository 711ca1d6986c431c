"""The latent of multi-head latent attention: absorbed and expanded forms are one function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvist.base.errors import KernelError
from kvist.kernels.latent import absorb, attend_absorbed, compress, expand, expand_output
from kvist.verify.compare import assert_bits_equal, assert_close

DOUBLE = 1e-12  # relative norm, float64, two orders of a few hundred additions
H, D, DV, C, R, HIDDEN = 2, 4, 6, 8, 4, 20


def weights(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(C, HIDDEN, dtype=dtype),
        torch.randn(H, D, C, dtype=dtype),
        torch.randn(H, DV, C, dtype=dtype),
    )


def test_compress_and_expand_are_the_matrix_products() -> None:
    w_dkv, w_uk, w_uv = weights()
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    c = compress(x, w_dkv)
    k, v = expand(c, w_uk, w_uv)
    assert_close(c, x @ w_dkv.T, DOUBLE)
    assert_close(k, torch.einsum("tc,hdc->thd", c, w_uk), DOUBLE)
    assert_close(v, torch.einsum("tc,hdc->thd", c, w_uv), DOUBLE)


def test_a_row_does_not_depend_on_the_number_of_rows() -> None:
    w_dkv, w_uk, w_uv = weights(torch.float32)
    x = torch.randn(64, HIDDEN)
    together = compress(x, w_dkv)
    alone = torch.cat([compress(x[t : t + 1], w_dkv) for t in range(64)])
    assert_bits_equal(together, alone)
    assert_bits_equal(expand(together, w_uk, w_uv)[0][7:8], expand(together[7:8], w_uk, w_uv)[0])


def test_absorbing_moves_the_key_matrix_to_the_query() -> None:
    _, w_uk, w_uv = weights()
    q, c = torch.randn(3, H, D, dtype=torch.float64), torch.randn(7, C, dtype=torch.float64)
    k, _ = expand(c, w_uk, w_uv)
    absorbed = torch.einsum("thc,jc->thj", absorb(q, w_uk), c)
    assert_close(absorbed, torch.einsum("thd,jhd->thj", q, k), DOUBLE)


def test_expanding_the_output_is_expanding_the_values() -> None:
    _, w_uk, w_uv = weights()
    p, c = torch.rand(3, H, 7, dtype=torch.float64), torch.randn(7, C, dtype=torch.float64)
    _, v = expand(c, w_uk, w_uv)
    late = expand_output(torch.einsum("thj,jc->thc", p, c), w_uv)
    assert_close(late, torch.einsum("thj,jhd->thd", p, v), DOUBLE)


def test_a_compressed_key_is_lossy_when_the_key_is_random() -> None:
    # A latent of width C cannot hold a row of width H * (D + Dv): projecting down and up again loses most of it.
    row = torch.randn(1, H * (D + DV), dtype=torch.float64)
    down = torch.randn(C, H * (D + DV), dtype=torch.float64)
    back = compress(compress(row, down), torch.linalg.pinv(down))
    assert float((back - row).norm() / row.norm()) > 0.3


@pytest.mark.parametrize("shape", [(3, 5), (3, 2, 5)])
def test_misfitting_shapes_are_refused(shape: tuple[int, ...]) -> None:
    _, w_uk, w_uv = weights()
    with pytest.raises(KernelError, match="fit"):
        absorb(torch.randn(shape, dtype=torch.float64)[..., None, :], w_uk) if len(shape) == 2 else absorb(
            torch.randn(shape, dtype=torch.float64), w_uk
        )
    with pytest.raises(KernelError, match="fit"):
        expand(torch.randn(3, C + 1, dtype=torch.float64), w_uk, w_uv)


def test_absorbed_attention_of_one_query() -> None:
    _, w_uk, w_uv = weights()
    q, q_rope = torch.randn(H, D, dtype=torch.float64), torch.randn(H, R, dtype=torch.float64)
    c, k_rope = torch.randn(9, C, dtype=torch.float64), torch.randn(9, R, dtype=torch.float64)
    k, v = expand(c, w_uk, w_uv)
    full_q, full_k = torch.cat([q, q_rope], 1), torch.cat([k, k_rope[:, None].expand(-1, H, -1)], 2)
    scale = (D + R) ** -0.5
    p = torch.softmax(torch.einsum("hd,jhd->hj", full_q, full_k) * scale, 1)
    assert_close(attend_absorbed(q, q_rope, c, k_rope, w_uk, w_uv, scale), torch.einsum("hj,jhd->hd", p, v), DOUBLE)
