"""B40 for the planner: from config fields to bytes per token; experts change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from kvist.plan.plan import plan

STANDARD = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
LATENT = {"num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3-4B": ({**STANDARD, "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 2560}, 147_456),
    "Mistral-Small-24B": (
        {**STANDARD, "model_type": "mistral", "num_hidden_layers": 40, "hidden_size": 5120, "sliding_window": None},
        163_840,
    ),
    "gpt-oss-20b": (
        {
            **STANDARD,
            "model_type": "gpt_oss",
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "head_dim": 64,
            "hidden_size": 2880,
            "sliding_window": None,
        },
        49_152,
    ),
    "Llama-3-8B": (
        {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"hidden_size": 4096, "dtype": "bfloat16"},
        131_072,
    ),
    "DeepSeek-V3": ({**LATENT, "model_type": "deepseek_v3", "num_hidden_layers": 61}, 70_272),
    "DeepSeek-V2-Lite": ({**LATENT, "model_type": "deepseek_v2", "num_hidden_layers": 27}, 31_104),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("experts", [{}, {"num_experts": 8, "num_local_experts": 64, "n_routed_experts": 256}])
def test_bytes_per_token(name: str, experts: dict[str, int]) -> None:
    config, expected = CASES[name]
    assert plan({**config, **experts}, kv_cache_dtype="bfloat16").growing_bytes_per_token == expected


def test_llama_70b_at_2048_tokens() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    made = plan({**config, "hidden_size": 8192, "dtype": "bfloat16"}, ctx_size=2048)
    assert made.sequence_bytes == made.allocated_bytes == 640 * 2**20


def test_the_expanded_form_of_a_latent() -> None:
    config = {**LATENT, "model_type": "deepseek_v2", "num_hidden_layers": 27, "num_attention_heads": 16}
    made = plan(
        {**config, "qk_nope_head_dim": 128, "v_head_dim": 128},
        engine="llama.cpp",
        engine_flags={"latent": "expanded"},
        ctx_size=256,
    )
    assert made.allocated_bytes == 276_480 * 256
