"""B40: bytes per token follow kv heads and the head's own width; a latent is one row for all heads."""

from __future__ import annotations

import pytest

from kvist.base.dtypes import BFLOAT16
from kvist.cache.addressing import Paged
from kvist.cache.layout import Layout
from kvist.cache.rows import KeyValue, Latent, Rows


@pytest.mark.parametrize(
    ("model", "layers", "rows", "expected"),
    [
        ("Qwen3-4B", 36, KeyValue(8, 128, 128), 147_456),
        ("Mistral-Small-24B", 40, KeyValue(8, 128, 128), 163_840),
        ("gpt-oss-20b, all full", 24, KeyValue(8, 64, 64), 49_152),
        ("Llama-3-8B", 32, KeyValue(8, 128, 128), 131_072),
        ("DeepSeek-V3", 61, Latent(512, 64), 70_272),
        ("DeepSeek-V2-Lite", 27, Latent(512, 64), 31_104),
        ("DeepSeek-V2-Lite, materialised", 27, KeyValue(16, 192, 128), 276_480),
        ("GLM-5 family, latent alone", 78, Latent(512, 64), 89_856),
    ],
)
def test_bytes_per_token(model: str, layers: int, rows: Rows, expected: int) -> None:
    assert layers * Layout(rows, BFLOAT16, Paged(16)).bytes_per_token == expected, model


def test_llama_70b_at_2048_tokens() -> None:
    assert 80 * 2048 * Layout(KeyValue(8, 128, 128), BFLOAT16, Paged(16)).bytes_per_token == 640 * 2**20
