"""Law 3 for the planner: what a plan says kvist allocates is what the pool of a loaded model holds, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

import kvist
from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.cache.layout import groups_of
from kvist.cache.pool import Pool
from kvist.cache.sizing import BLOCK_SIZE, STEP_TOKENS, blocks_for, context_bytes
from kvist.plan.engines import kvist_pool
from kvist.plan.plan import plan
from kvist.spec.from_config import model_spec
from kvist.spec.from_gguf import gguf_model
from kvist.spec.source import resolve

GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
    "sliding_window": 100,
    "max_position_embeddings": 4096,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "block", "ctx", "dtype"), [("smollm2", 16, 333, "float32"), ("gemma3", 64, 1500, "bfloat16")]
)
def test_a_loaded_model_holds_what_was_planned(model: str, block: int, ctx: int, dtype: str) -> None:
    made = plan(model, ctx_size=ctx, block_size=block, kv_cache_dtype=dtype)
    with kvist.load(model, ctx_size=ctx, block_size=block, kv_cache_dtype=dtype, max_num_seqs=1) as llm:
        assert llm.setup is not None
        assert made.allocated_bytes == llm.setup.cache_bytes
        assert made.growing_bytes_per_token + made.windowed_bytes_per_token == llm.setup.bytes_per_token


@pytest.mark.parametrize(("block", "ctx"), [(16, 1), (16, 333), (64, 200), (128, 129), (64, 1500), (16, 4096)])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_pool_holds_what_was_planned(block: int, ctx: int, count: int, dtype: DType) -> None:
    made = plan(GEMMA, ctx_size=ctx, block_size=block, max_num_seqs=count, kv_cache_dtype=dtype.name)
    groups = groups_of(model_spec(GEMMA), dtype, block)
    chunk = max(min(STEP_TOKENS, ctx), count)
    assert Pool(groups, blocks_for(groups, ctx, chunk, count), chunk=chunk).nbytes == made.allocated_bytes


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_groups_are_those_of_the_pool(dtype: DType) -> None:
    for engine, spec in (
        (plan(GEMMA, kv_cache_dtype=dtype.name).engine, model_spec(GEMMA)),
        (plan("gemma3", kv_cache_dtype=dtype.name).engine, gguf_model(resolve("gemma3").path).spec),
    ):
        assert isinstance(engine, kvist_pool.KvistEngine)
        assert engine.groups == groups_of(spec, dtype, BLOCK_SIZE)


def test_many_requests_make_steps_longer() -> None:
    """Beyond the usual step, every running request still gets its token: windows have room for that."""
    count, ctx = 2000, 4096
    made = plan(GEMMA, ctx_size=ctx, max_num_seqs=count, kv_cache_dtype="bfloat16")
    groups = groups_of(model_spec(GEMMA), BFLOAT16, BLOCK_SIZE)
    assert made.allocated_bytes == context_bytes(groups, ctx, count, count)
    assert made.allocated_bytes > context_bytes(groups, ctx, STEP_TOKENS, count)
