"""B43: nested, null, zero and missing fields; the cache type is never assumed in silence."""

from __future__ import annotations

from typing import Any

import pytest

from kvist.base.errors import BadValue, MissingField, WrongType
from kvist.plan.plan import Plan, plan
from kvist.plan.report import render

BASE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "hidden_size": 512,
}
PER_KV_HEAD = 4 * 2 * 64 * 2  # layers, K and V, width, bytes
GLM = {"model_type": "glm_moe_dsa", "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64}
GLM |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "index_head_dim": 128}


def growing(config: dict[str, Any], **options: Any) -> int:
    return int(plan(config, kv_cache_dtype="bfloat16", **options).growing_bytes_per_token)


@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": None}, {"num_key_value_heads": 8, "head_dim": None}])
def test_null_or_missing_kv_heads_mean_one_each(fields: dict[str, Any]) -> None:
    assert growing({**BASE, **fields}) == 8 * PER_KV_HEAD


def test_nested_text_config_is_found_latent_too() -> None:
    assert growing({"model_type": "llava", "text_config": {**BASE, "num_key_value_heads": 2}}) == 2 * PER_KV_HEAD
    assert growing({"model_type": "kimi_vl", "text_config": {**GLM, "model_type": "kimi_k2"}}) == 78 * 576 * 2


def shown(made: Plan) -> str:
    return render(made)


@pytest.mark.parametrize(
    ("config", "name", "told"),
    [
        ({**BASE, "torch_dtype": "float16"}, "float16", "config.json: torch_dtype"),
        ({**BASE, "dtype": "bfloat16"}, "bfloat16", "config.json: dtype"),
        ({"model_type": "x", "dtype": "float16", "text_config": BASE}, "float16", "config.json: dtype"),
        ({"model_type": "x", "text_config": {**BASE, "dtype": "float16"}}, "float16", "text_config: dtype"),
        (BASE, "bfloat16", "the config names no type"),
        ({**BASE, "dtype": "float8_e4m3fn"}, "bfloat16", "the model's own is float8_e4m3fn"),
    ],
)
def test_the_type_in_use_is_printed_with_its_source(config: dict[str, Any], name: str, told: str) -> None:
    made = plan(config)
    assert made.types.name == name
    assert name in shown(made) and told in shown(made)


def test_an_explicit_type_wins() -> None:
    made = plan({**BASE, "dtype": "float16"}, kv_cache_dtype="float32")
    assert made.types.name == "float32"
    assert made.growing_bytes_per_token == 2 * 8 * PER_KV_HEAD


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"num_attention_heads": 0}, BadValue, "num_attention_heads = 0"),
        ({"num_key_value_heads": 0}, BadValue, "num_key_value_heads = 0"),
        ({"num_hidden_layers": None}, MissingField, "num_hidden_layers"),
        ({"num_attention_heads": None}, MissingField, "num_attention_heads"),
        ({"hidden_size": 514}, BadValue, "hidden_size 514 is not a multiple of num_attention_heads 8"),
        ({"hidden_size": -512}, BadValue, "hidden_size = -512"),
        ({"num_key_value_heads": 3}, BadValue, "8 query heads cannot be shared evenly by 3 kv heads"),
        ({"num_hidden_layers": "many"}, WrongType, "num_hidden_layers must be an integer"),
        ({"num_hidden_layers": 10**9}, BadValue, "num_hidden_layers"),
        ({"head_dim": True}, WrongType, "head_dim must be an integer"),
        ({"n_head": 16}, BadValue, "num_attention_heads = 8 and n_head = 16 contradict"),
        ({"layer_types": ["full_attention"]}, BadValue, "layer_types has 1 entries, but the model has 4 layers"),
    ],
)
def test_unusable_values_name_their_field(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        plan({**BASE, **fields})


@pytest.mark.parametrize("head_dim", [64, 192, None])
def test_head_dim_is_no_matter_for_a_latent_and_the_indexer_is_named(head_dim: int | None) -> None:
    made = plan({**GLM, "head_dim": head_dim}, kv_cache_dtype="bfloat16")
    assert made.growing_bytes_per_token == 89_856
    assert made.indexer_bytes_per_token == 78 * 128 * 2
    assert "indexer key 128" in shown(made)
    assert made.sequence_bytes == made.ctx_size * (89_856 + 78 * 128 * 2)


def test_fp8_is_half_of_bfloat16_and_its_scales() -> None:
    half = plan(BASE, engine="vllm", kv_cache_dtype="fp8").growing_bytes_per_token
    assert 2 * half == growing(BASE)
    scaled = plan(BASE, engine="vllm", kv_cache_dtype="fp8_per_token_head").growing_bytes_per_token
    assert scaled == half + 4 * 8 * 2 * 4
