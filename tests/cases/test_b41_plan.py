"""B41 for the planner: windows are charged their window, engines say what they reserve, the inverse is a search."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvist.plan.plan import plan

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
GEMMA3_1B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
}


def test_gpt_oss_at_131072_tokens() -> None:
    assert plan(GPT_OSS, ctx_size="max").sequence_bytes == 3_224_371_200 == 3 * 2**30 + 3 * 2**20


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 26_624), (511, 13_604_864), (512, 13_631_488), (513, 13_635_584), (1024, 15_728_640), (32_768, 145_752_064)],
)
def test_gemma3_1b_around_its_window(tokens: int, expected: int) -> None:
    assert plan(GEMMA3_1B, ctx_size=tokens).sequence_bytes == expected


def test_32_sequences_of_8192_and_what_each_engine_reserves() -> None:
    minimal = plan(GPT_OSS, ctx_size=8192, max_num_seqs=32)
    assert f"{minimal.total_bytes / 2**30:.2f}" == "6.09"
    assert minimal.total_bytes < minimal.allocated_bytes < 12 * 2**30
    full = plan(GPT_OSS, ctx_size=8192, max_num_seqs=32, engine="vllm", engine_flags={"hybrid_manager": False})
    assert full.allocated_bytes == 12 * 2**30
    assert full.total_bytes == minimal.total_bytes
    assert json.loads(json.dumps(full.to_dict()))["allocated_bytes"] == 12 * 2**30


@pytest.mark.parametrize("engine", ["kvist", "vllm", "sglang", "llama.cpp"])
def test_the_inverse_for_100_mib(engine: str) -> None:
    available = 100 * 2**20
    made = plan(GEMMA3_1B, engine=engine, kv_cache_memory=available)
    longest = made.max_context
    assert longest is not None and 0 < longest < 32768
    assert made.engine.allocated(longest, 1) <= available < made.engine.allocated(longest + 1, 1)
