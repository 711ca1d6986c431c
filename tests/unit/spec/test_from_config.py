from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvist.base.errors import BadValue, Corrupt, MissingField, SpecError, UnknownArchitecture, UsageError, WrongType
from kvist.spec.from_config import model_spec
from kvist.spec.model import Attention, LinearScaling, Llama3Scaling, Rope

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
}
GEMMA: dict[str, Any] = {
    **LLAMA,
    "model_type": "gemma3_text",
    "head_dim": 16,
    "num_hidden_layers": 7,
    "sliding_window": 8,
    "query_pre_attn_scalar": 64,
    "rope_theta": 1e6,
    "rope_local_base_freq": 5e3,
}


def attentions(config: dict[str, Any]) -> list[Attention]:
    found = [layer.attention for layer in model_spec(config).layers]
    assert all(isinstance(a, Attention) for a in found)
    return found  # type: ignore[return-value]


def rope_of(config: dict[str, Any], index: int = 0) -> Rope:
    rope = attentions(config)[index].rope
    assert rope is not None
    return rope


def test_llama() -> None:
    spec = model_spec(LLAMA)
    assert (spec.architecture, spec.family, spec.num_layers, spec.tied_embeddings) == (
        "LlamaForCausalLM",
        "llama",
        2,
        False,
    )
    first = attentions(LLAMA)[0]
    assert (first.num_heads, first.num_kv_heads, first.head_dim, first.scale) == (4, 2, 16, 0.25)
    assert first.window is None and not first.qk_norm and not first.qkv_bias
    assert first.rope == Rope(10_000.0, 16)
    assert spec.eos_token_ids == (2,) and spec.bos_token_id == 1


def test_gemma3() -> None:
    spec = model_spec(GEMMA)
    assert [a.window for a in attentions(GEMMA)] == [8, 8, 8, 8, 8, None, 8]
    assert [a.rope.theta for a in attentions(GEMMA) if a.rope] == [5e3] * 5 + [1e6, 5e3]
    assert spec.embedding_scale == math.sqrt(64) and spec.norm.offset == 1.0 and spec.tied_embeddings
    assert spec.layers[0].post_norms and spec.layers[0].feed_forward.activation == "gelu_tanh"
    assert attentions(GEMMA)[0].scale == 1 / 8 and attentions(GEMMA)[0].qk_norm


def test_gemma3_nested_takes_absent_fields_from_its_class_and_says_so() -> None:
    spec = model_spec({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}})
    first = spec.layers[0].attention
    assert isinstance(first, Attention)
    assert (first.num_heads, first.num_kv_heads, first.head_dim, first.window) == (8, 4, 256, 4096)
    assert "num_attention_heads = 8 is the class default" in spec.notes


def test_at_the_top_level_nothing_is_taken_from_a_class() -> None:
    with pytest.raises(MissingField, match=r"'num_hidden_layers' or .* is missing"):
        model_spec({key: value for key, value in GEMMA.items() if key != "num_hidden_layers"})


def test_layer_types_come_before_the_pattern() -> None:
    kinds = ["full_attention", *["sliding_attention"] * 6]
    assert [a.window for a in attentions({**GEMMA, "layer_types": kinds})] == [None, *[8] * 6]
    assert [a.window for a in attentions({**GEMMA, "sliding_window_pattern": 2})] == [8, None, 8, None, 8, None, 8]


def test_rope_parameters_of_both_generations() -> None:
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
    }
    config = {key: value for key, value in GEMMA.items() if not key.startswith("rope")}
    assert rope_of({**config, "rope_parameters": nested}) == Rope(7e3, 16)
    assert rope_of({**config, "rope_parameters": nested}, 5) == Rope(2e6, 16, LinearScaling(8.0))
    old = {**GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert rope_of(old, 0).scaling is None and rope_of(old, 5).scaling == LinearScaling(8.0)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling(key: str) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    full = {**scaling, "original_max_position_embeddings": 64}
    assert rope_of({**LLAMA, key: full}).scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
    assert rope_of({**LLAMA, key: scaling}).scaling == Llama3Scaling(8.0, 1.0, 4.0, 256)


def test_every_stop_token_counts() -> None:
    config = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": {**GEMMA, "eos_token_id": 1}}
    assert model_spec(config).eos_token_ids == (1, 106)


def test_stop_tokens_of_the_generation_settings(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert model_spec(tmp_path).eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"model_type": "nonsense"}, UnknownArchitecture, "'nonsense'; supported to run: llama, mistral"),
        ({"model_type": None}, MissingField, "'model_type' is missing"),
        ({"model_type": "longcat_flash"}, SpecError, "can be planned"),
        ({"num_attention_heads": 0}, BadValue, "num_attention_heads = 0 is outside 1"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 8}, BadValue, "6 is not a multiple of"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, BadValue, "hidden_size 64 is not a multiple"),
        ({"hidden_size": "64"}, WrongType, "hidden_size must be an integer, is '64'"),
        ({"hidden_size": 2**40}, BadValue, "hidden_size"),
        ({"rms_norm_eps": 0}, BadValue, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, BadValue, "rms_norm_eps"),
        ({"vocab_size": None}, MissingField, "'vocab_size' is missing"),
        ({"hidden_act": "relu"}, BadValue, "activation 'relu' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, MissingField, "'factor' is missing"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale_all_dim": 0.5}},
            BadValue,
            "mscale = None and mscale_all_dim = 0.5: implementations disagree",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 0}},
            BadValue,
            "mscale = 0.7 and mscale_all_dim = None",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, BadValue, "rope scaling 'dynamic'"),
        ({"rope_scaling": {"factor": 2.0}}, MissingField, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, MissingField, "'factor' is missing"),
        ({"rope_scaling": 3}, WrongType, "rope_scaling must be a mapping"),
        ({"rope_theta": -1}, BadValue, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, WrongType, "tie_word_embeddings must be true or false"),
        ({"layer_types": ["full_attention"]}, BadValue, "layer_types has 1 entries, but the model has 2 layers"),
        ({"layer_types": ["full_attention", "mamba"]}, BadValue, r"layer_types\[1\] = 'mamba'"),
        ({"partial_rotary_factor": 0.05}, BadValue, "rotary channels"),
        ({"eos_token_id": ["x"]}, WrongType, "eos_token_id"),
    ],
)
def test_fails_closed(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        model_spec({**LLAMA, **fields})


def test_gemma3_refusals() -> None:
    with pytest.raises(BadValue, match="only causal"):
        model_spec({**GEMMA, "use_bidirectional_attention": True})
    with pytest.raises(MissingField, match="sliding_window"):
        model_spec({**GEMMA, "sliding_window": None})


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [(b"{", Corrupt, "is not JSON"), (b"[1]", Corrupt, "holds a list"), (b"\xff\xfe", Corrupt, "is not JSON")],
)
def test_unreadable_files(tmp_path: Path, content: bytes, error: type[Exception], words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(error, match=words):
        model_spec(path)
    with pytest.raises(UsageError, match="no such file"):
        model_spec(tmp_path / "absent.json")
