"""Bytes are monotone, additive and invertible for whatever a config may say; no combination of fields crashes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.base.errors import KvistError
from kvist.plan.cost import Widths, kinds_of, sequence_bytes
from kvist.plan.engines.base import Engine, max_context, max_sequences
from kvist.plan.formats import FORMATS
from kvist.plan.plan import plan
from kvist.plan.settings import ENGINES, PlanSettings, choose_types, make_engine
from kvist.spec.cache_spec import cache_spec
from kvist.spec.families import BY_MODEL_TYPE
from kvist.spec.kept import CacheSpec

BF16 = Widths(FORMATS["bfloat16"], FORMATS["bfloat16"])


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Windows, latents, states, lists: what a family of its kind would publish, small and large."""
    layers = draw(st.integers(1, 24))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * draw(st.sampled_from([1, 2, 3, 8])),
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([32, 64, 96, 128, 256])),
        "max_position_embeddings": draw(st.sampled_from([None, 4096, 131072])),
    }
    kind = draw(st.sampled_from(["llama", "gemma3_text", "mistral", "deepseek_v3", "qwen3_next", "gpt_oss", "jamba"]))
    config["model_type"] = kind
    config["sliding_window"] = draw(st.sampled_from([None, 1, 128, 1000, 4096]))
    config |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 1024}
    config |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32}
    config |= {"linear_value_head_dim": 32, "linear_conv_kernel_dim": 4}
    config |= {"attn_layer_period": 4, "attn_layer_offset": draw(st.integers(0, 3))}
    return config


def engine_of(spec: CacheSpec, name: str) -> Engine:
    settings = PlanSettings(engine=name)
    return make_engine(spec, choose_types(spec, settings), settings)


@given(configs(), st.sampled_from(ENGINES), st.integers(1, 10_000), st.integers(1, 3000), st.integers(1, 9))
def test_allocation_is_monotone_and_never_below_the_rows(
    config: dict[str, Any], name: str, ctx: int, more: int, count: int
) -> None:
    engine = engine_of(cache_spec(config), name)
    size = engine.allocated(ctx, count)
    assert size <= engine.allocated(ctx + more, count)
    assert size <= engine.allocated(ctx, count + 1)
    if name == "kvist":
        assert size >= count * sequence_bytes(engine.kinds, ctx)


@given(configs(), st.integers(0, 10_000), st.integers(0, 3000))
def test_rows_are_monotone_and_additive_over_layers(config: dict[str, Any], ctx: int, more: int) -> None:
    spec = cache_spec(config)
    whole = sequence_bytes(kinds_of(spec.layers, BF16), ctx)
    assert whole <= sequence_bytes(kinds_of(spec.layers, BF16), ctx + more)
    assert whole == sum(sequence_bytes(kinds_of([layer], BF16), ctx) for layer in spec.layers)


@given(configs(), st.sampled_from(ENGINES), st.integers(1, 2**36), st.integers(1, 5))
def test_the_inverse_is_the_forward_sum_turned_round(
    config: dict[str, Any], name: str, available: int, count: int
) -> None:
    engine = engine_of(cache_spec(config), name)
    longest = max_context(engine, available, count, 10**6)
    if longest:
        assert engine.allocated(longest, count) <= available
    if longest < 10**6:
        assert engine.allocated(longest + 1, count) > available
    most = max_sequences(engine, available, 777, 10**6)
    if most:
        assert engine.allocated(777, most) <= available
    if most < 10**6:
        assert engine.allocated(777, most + 1) > available


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-1, 9), max_size=4),
    st.dictionaries(st.sampled_from(["num_heads", "head_dim", "attention"]), st.integers(0, 9), max_size=2),
)
FIELD_NAMES = """
num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_size sliding_window layer_types
max_position_embeddings kv_lora_rank qk_rope_head_dim index_head_dim compress_ratios block_configs dtype
hybrid_override_pattern linear_attn_config attn_config text_config quantization_config num_kv_shared_layers
full_attn_idxs mamba_d_state n_layer n_head vocab_size intermediate_size num_experts
"""
FIELDS = tuple(FIELD_NAMES.split())


@given(st.sampled_from(sorted(BY_MODEL_TYPE)), st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=8))
def test_no_fields_crash(model_type: str, fields: dict[str, Any]) -> None:
    base = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 256, "head_dim": 64}
    config = {**base, "model_type": model_type, **fields}
    for name in ENGINES:
        try:
            made = plan(config, engine=name, memory=2**34)
        except KvistError as error:
            assert str(error)
            continue
        assert made.allocated_bytes >= 0
        made.to_dict()


@pytest.mark.parametrize("ctx", [2**31 - 1, 2**31, 2**32 + 1, 2**40])
def test_large_counts_are_exact(ctx: int) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192}
    made = plan(config, ctx_size=ctx, max_num_seqs=1000, kv_cache_dtype="bfloat16")
    assert made.total_bytes == 1000 * ctx * 80 * 2 * 8192 * 2
