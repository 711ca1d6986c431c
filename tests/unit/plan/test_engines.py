"""Flags and corners of the engines that the golden sizes do not reach."""

from __future__ import annotations

from typing import Any

import pytest

from kvist.base.errors import UsageError
from kvist.plan.engines.llama_cpp import LlamaCppEngine
from kvist.plan.engines.sglang import SglangEngine
from kvist.plan.engines.vllm import VllmEngine
from kvist.plan.plan import plan

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "dtype": "bfloat16",
}
LATENT = {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
MIXED = {**LLAMA, "model_type": "gemma3_text", "head_dim": 64, "num_hidden_layers": 12, "sliding_window": 256}
PER_HEAD = 4 * 2 * 64 * 2


@pytest.mark.parametrize(("ranks", "heads"), [(1, 2), (2, 1), (4, 1), (8, 1)])
def test_kv_heads_are_divided_then_repeated(ranks: int, heads: int) -> None:
    made = plan(LLAMA, engine="vllm", tensor_parallel=ranks, ctx_size=16)
    assert made.allocated_bytes == 16 * heads * PER_HEAD


def test_latents_are_on_every_rank_unless_the_context_is_split() -> None:
    alone = plan(LATENT, engine="vllm", ctx_size=1024).allocated_bytes
    assert plan(LATENT, engine="vllm", ctx_size=1024, tensor_parallel=8).allocated_bytes == alone
    split = plan(LATENT, engine="vllm", ctx_size=1024, tensor_parallel=8, engine_flags={"decode_context_parallel": 8})
    assert split.allocated_bytes == alone // 8


def test_heads_that_ranks_do_not_divide() -> None:
    with pytest.raises(UsageError, match="2 kv heads cannot be spread over 3 ranks"):
        plan(LLAMA, engine="vllm", tensor_parallel=3)


def test_vllm_rounds_to_blocks() -> None:
    sizes = [plan(LLAMA, engine="vllm", ctx_size=ctx).allocated_bytes for ctx in (1, 16, 17)]
    assert sizes == [16 * 2 * PER_HEAD, 16 * 2 * PER_HEAD, 32 * 2 * PER_HEAD]


def test_vllm_windows_hold_a_batch_and_a_block() -> None:
    engine = plan(MIXED, engine="vllm", engine_flags={"max_num_batched_tokens": 512}).engine
    assert isinstance(engine, VllmEngine)
    assert (engine.group_size, engine.num_groups) == (2, 6)
    full, windows = -(-4096 // 16), -(-(255 + 512) // 16) + 1
    assert engine.blocks_per_request(4096) == full + 5 * windows


def test_pages_that_cannot_be_made_equal_are_charged_in_full() -> None:
    config = {
        **MIXED,
        "model_type": "mimo_v2_flash",
        "head_dim": 96,
        "swa_head_dim": 64,
        "swa_num_key_value_heads": 2,
        "hybrid_layer_pattern": [0, 1] * 6,
    }
    made = plan(config, engine="vllm", ctx_size=4096)
    assert any("charged in full" in line for line in made.engine.explain(4096, 1))


def test_sglang_pools() -> None:
    engine = plan(MIXED, engine="sglang").engine
    assert isinstance(engine, SglangEngine)
    per_layer = 2 * 64 * 2 * 2
    assert (engine.full, engine.windowed) == (2 * per_layer, 10 * per_layer)
    assert engine.cell == 2 * per_layer + 0.8 * 10 * per_layer


def test_llama_cpp_cells() -> None:
    engine = plan(MIXED, engine="llama.cpp").engine
    assert isinstance(engine, LlamaCppEngine)
    assert engine.cells(1000) == 1024
    assert engine.window_cells(8192, 256, 1) == 768
    assert engine.window_cells(8192, 256, 4) == 1536
    assert engine.window_cells(300, 256, 1) == 512


def test_llama_cpp_knows_no_window_where_all_layers_have_one() -> None:
    config = {**LLAMA, "model_type": "mistral", "sliding_window": 128}
    assert plan(config, engine="llama.cpp", ctx_size=4096, cache_type_k="f16", cache_type_v="f16").allocated_bytes == (
        4096 * 2 * PER_HEAD
    )
    assert plan(config, ctx_size=4096).sequence_bytes == 128 * 2 * PER_HEAD


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "vllm", "engine_flags": {"nonsense": 1}}, "vllm has no setting nonsense"),
        ({"engine": "kvist", "kv_cache_dtype": "q8_0"}, "kvist has no cache type 'q8_0': use one of float32"),
        ({"engine": "kvist", "cache_type_k": "float16"}, "kvist stores keys and values in one type"),
        ({"engine": "llama.cpp", "tensor_parallel": 2}, "splits layers over devices"),
        ({"kv_cache_dtype": "float16", "cache_type_k": "float16"}, "contradict each other"),
        ({"memory": 1, "kv_cache_memory": 1}, "both given"),
        ({"memory": "twelve"}, "memory is 'twelve'"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"ctx_size": -5}, "ctx_size is -5"),
        ({"ctx_size": "max"}, "names no longest context"),
        ({"utilisation": 1.5}, "utilisation is 1.5"),
        ({"nonsense": 1}, "unknown option nonsense: a plan has ctx_size"),
        ({"device": "potato"}, "unknown device 'potato': use this, or one of t4"),
        ({"engine": "llama.cpp", "kv_cache_dtype": "q4_0"}, None),
    ],
)
def test_options(options: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert plan(LLAMA, **options).allocated_bytes > 0
        return
    with pytest.raises(UsageError, match=words):
        plan(LLAMA, **options)


def test_blocks_that_do_not_divide_a_row() -> None:
    narrow = {**LLAMA, "head_dim": 20, "num_key_value_heads": 1}
    with pytest.raises(UsageError, match="q4_0 stores 32 elements together, which do not divide a row of 20"):
        plan(narrow, engine="llama.cpp", kv_cache_dtype="q4_0")


def test_the_verdict_and_its_inverse() -> None:
    config = {**LLAMA, "max_position_embeddings": 100_000}
    need = plan(config, ctx_size=4096).allocated_bytes
    exact = plan(config, ctx_size=4096, kv_cache_memory=need)
    assert (exact.fits, exact.max_context, exact.max_sequences, exact.exit_code) == (True, 4096, 1, 0)
    short = plan(config, ctx_size=4096, kv_cache_memory=need - 1)
    assert (short.fits, short.max_context, short.max_sequences, short.exit_code) == (False, 4032, 0, 3)


def test_an_encoder_keeps_nothing_and_says_so() -> None:
    made = plan({"model_type": "bert", "num_hidden_layers": 12}, memory=2**34)
    assert (made.allocated_bytes, made.growing_bytes_per_token, made.spec.encoder_only) == (0, 0, True)
    assert any("no cache" in note for note in made.notes)


def test_the_factor_against_multi_head_attention() -> None:
    assert plan(LLAMA).mha_factor == 4.0
    full = {**LATENT, "num_attention_heads": 128, "qk_nope_head_dim": 128, "v_head_dim": 128}
    factor = plan(full).mha_factor
    assert factor is not None and round(factor, 1) == 56.9
