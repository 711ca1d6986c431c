"""GGUF headers of architectures that can only be planned, written as converters write them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.base.errors import KvistError, UnknownArchitecture
from kvist.plan.cost import Widths, kinds_of
from kvist.plan.formats import FORMATS
from kvist.spec.cache_from_gguf import gguf_cache_spec
from kvist.spec.cache_spec import cache_spec
from kvist.spec.families import BY_GGUF
from kvist.spec.gguf_file import GgufFile
from kvist.spec.kept import KeyValueRows, LatentRows, StateRows
from kvist.spec.source import resolve

BF16 = Widths(FORMATS["bfloat16"], FORMATS["bfloat16"])


def header(architecture: str, **fields: Any) -> dict[str, Any]:
    named = {f"{architecture}.{key.replace('__', '.')}": value for key, value in fields.items()}
    return {"general.architecture": architecture, **named}


def growing(path: Path) -> int:
    return int(sum(kind.growing for kind in kinds_of(gguf_cache_spec(path).layers, BF16)))


def test_the_bundled_models() -> None:
    small, gemma = gguf_cache_spec(resolve("smollm2").path), gguf_cache_spec(resolve("gemma3").path)
    assert [layer.kind for layer in small.layers] == ["full"] * 30
    assert [layer.kind for layer in gemma.layers] == (["swa"] * 5 + ["full"]) * 3
    assert small.weights_bytes == 96_576_768 and small.weights_source.startswith("exact")


def test_kv_heads_per_layer_and_layers_without_any(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(
        header(
            "deci",
            block_count=4,
            embedding_length=1024,
            attention__head_count=8,
            attention__head_count_kv=[8, 0, 2, 0],
        )
    )
    layers = gguf_cache_spec(path).layers
    assert [layer.kind for layer in layers] == ["full", "none", "full", "none"]
    assert growing(path) == (8 + 2) * 2 * 128 * 2


def test_a_latent(write_gguf: Callable[..., Path]) -> None:
    fields = {
        "block_count": 3,
        "embedding_length": 2048,
        "attention__head_count": 16,
        "attention__head_count_kv": 1,
        "attention__key_length": 576,
        "attention__value_length": 512,
        "attention__key_length_mla": 192,
        "attention__value_length_mla": 128,
        "attention__kv_lora_rank": 512,
        "rope__dimension_count": 64,
    }
    (rows,) = gguf_cache_spec(write_gguf(header("deepseek2", **fields))).layers[0].parts
    assert rows == LatentRows(512, 64, 16, 128, 128)


def test_states_where_kv_heads_are_zero(write_gguf: Callable[..., Path]) -> None:
    fields = {
        "block_count": 4,
        "embedding_length": 1024,
        "attention__head_count": 8,
        "attention__head_count_kv": [0, 0, 4, 0],
        "feed_forward_length": [0, 512, 0, 0],
        "attention__key_length": 128,
        "ssm__conv_kernel": 4,
        "ssm__state_size": 16,
        "ssm__inner_size": 256,
        "ssm__group_count": 2,
    }
    layers = gguf_cache_spec(write_gguf(header("nemotron_h", **fields))).layers
    assert [layer.kind for layer in layers] == ["mamba2", "none", "full", "mamba2"]
    assert layers[0].parts == (StateRows(256 * 16, 256 + 2 * 2 * 16, 4),)


def test_gated_delta_layers_agree_with_the_config(write_gguf: Callable[..., Path]) -> None:
    fields = {
        "block_count": 8,
        "embedding_length": 512,
        "attention__head_count": 8,
        "attention__head_count_kv": 2,
        "attention__key_length": 64,
        "full_attention_interval": 4,
        "ssm__conv_kernel": 4,
        "ssm__state_size": 32,
        "ssm__inner_size": 8 * 32,
        "ssm__group_count": 4,
        "ssm__time_step_rank": 8,
    }
    from_file = gguf_cache_spec(write_gguf(header("qwen3next", **fields)))
    from_config = cache_spec(
        {
            "model_type": "qwen3_next",
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
        }
    )
    assert from_file.layers == from_config.layers


def test_windows_shared_tails_and_two_widths(write_gguf: Callable[..., Path]) -> None:
    fields = {
        "block_count": 6,
        "embedding_length": 512,
        "attention__head_count": 8,
        "attention__head_count_kv": 2,
        "attention__key_length": 512,
        "attention__value_length": 512,
        "attention__key_length_swa": 256,
        "attention__value_length_swa": 256,
        "attention__sliding_window": 512,
        "attention__sliding_window_pattern": [True, True, False, True, True, False],
        "attention__shared_kv_layers": 3,
    }
    layers = gguf_cache_spec(write_gguf(header("gemma4", **fields))).layers
    assert [layer.kind for layer in layers] == ["swa", "swa", "full", "shared", "shared", "shared"]
    assert [layer.shared_with for layer in layers[3:]] == [1, 1, 2]
    assert layers[0].parts == (KeyValueRows(2, 256, 256, window=512),)
    assert layers[2].parts == (KeyValueRows(2, 512, 512),)


def test_unknown(write_gguf: Callable[..., Path]) -> None:
    with pytest.raises(UnknownArchitecture, match="no row for architecture 'brand-new'"):
        gguf_cache_spec(write_gguf(header("brand-new", block_count=2)))


KEYS = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_swa",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.shared_kv_layers",
    "attention.kv_lora_rank",
    "attention.key_length_mla",
    "rope.dimension_count",
    "nextn_predict_layers",
    "full_attention_interval",
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.inner_size",
)
VALUES = st.one_of(
    st.integers(-2, 600), st.floats(), st.text(max_size=3), st.booleans(), st.lists(st.integers(-1, 8), max_size=6)
)


@given(st.sampled_from(sorted(BY_GGUF)), st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_no_header_crashes(architecture: str, fields: dict[str, Any]) -> None:
    base = {"block_count": 4, "embedding_length": 256, "attention.head_count": 4}
    metadata = {f"{architecture}.{key}": value for key, value in {**base, **fields}.items()}
    file = GgufFile(Path("x.gguf"), 3, 0, {"general.architecture": architecture, **metadata}, {}, 0)
    with contextlib.suppress(KvistError):
        assert gguf_cache_spec(file).num_layers >= 0
