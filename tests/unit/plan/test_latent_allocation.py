"""Law 3 for latents: 576 values per token and layer for DeepSeek-V3, planned and allocated, 56.9 times below heads."""

from __future__ import annotations

import pytest

from deepseek_configs import V3
from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.cache.layout import groups_of
from kvist.cache.pool import Pool
from kvist.cache.rows import Latent
from kvist.cache.sizing import blocks_for
from kvist.plan.plan import plan
from kvist.spec.from_config import model_spec

CONTEXT = 128_000


def test_the_whole_model_at_128_000_tokens() -> None:
    made = plan(V3, ctx_size=CONTEXT, kv_cache_dtype="bfloat16")
    assert made.growing_bytes_per_token == 61 * 576 * 2
    assert made.allocated_bytes == made.sequence_bytes == 61 * 576 * 2 * CONTEXT
    assert f"{made.allocated_bytes / 2**30:.1f}" == "8.4"
    expanded = 128 * (128 + 128)  # numbers per token and layer that all heads together would keep
    assert f"{expanded / 576:.1f}" == "56.9"


def test_parameters_are_counted_to_the_last() -> None:
    """671 billion, of which the published model card speaks; the layer for multi-token prediction is not among them."""
    made = plan(V3, ctx_size=CONTEXT)
    assert f"{made.spec.parameters or 0:,}" == "671,026,419,200"


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("block", [16, 64, 128])
def test_a_layer_is_allocated_to_the_byte(dtype: DType, block: int) -> None:
    """One layer of V3's own rows, at the whole context: the pool holds what was planned, and 61 of them the model."""
    small = {**V3, "num_hidden_layers": 1, "first_k_dense_replace": 1, "hidden_size": 64, "q_lora_rank": None}
    made = plan(small, ctx_size=CONTEXT, block_size=block, kv_cache_dtype=dtype.name)
    groups = groups_of(model_spec(small), dtype, block)
    assert [group.layout.rows for group in groups] == [Latent(512, 64)]
    pool = Pool(groups, blocks_for(groups, CONTEXT, 512))
    assert pool.nbytes == made.allocated_bytes == 576 * dtype.bytes * CONTEXT
    whole = plan(V3, ctx_size=CONTEXT, block_size=block, kv_cache_dtype=dtype.name)
    assert whole.allocated_bytes == 61 * pool.nbytes
