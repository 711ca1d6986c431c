from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvist.base.errors import BadValue, MissingField, UnknownArchitecture, UsageError
from kvist.spec.from_gguf import gguf_model
from kvist.spec.model import Attention, LinearScaling, Rope
from kvist.spec.names import match_names
from kvist.spec.source import resolve


def first(path: Path) -> Attention:
    attention = gguf_model(path).spec.layers[0].attention
    assert isinstance(attention, Attention)
    return attention


def test_a_tiny_llama(llama_gguf: Path) -> None:
    model = gguf_model(llama_gguf)
    spec = model.spec
    assert model.permuted_qk and spec.tied_embeddings and spec.norm.offset == 0.0
    assert (spec.num_layers, spec.vocab_size, spec.max_position, spec.dtype) == (2, 32, 128, "q8_0")
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    match = match_names(spec, model.file.tensors, "gguf", {n: t.shape for n, t in model.file.tensors.items()})
    match.require("file")
    assert first(llama_gguf).rope == Rope(10_000.0, 16)


def test_smollm2() -> None:
    model = gguf_model(resolve("smollm2").path)
    attention = first(resolve("smollm2").path)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (9, 3, 64)
    assert attention.rope == Rope(100_000.0, 64) and model.permuted_qk


def test_gemma3() -> None:
    model = gguf_model(resolve("gemma3").path)
    spec = model.spec
    windows = [a.window for layer in spec.layers if isinstance(a := layer.attention, Attention)]
    assert windows == ([512] * 5 + [None]) * 3
    bases = [a.rope.theta for layer in spec.layers if isinstance(a := layer.attention, Attention) and a.rope]
    assert bases == ([1e4] * 5 + [1e6]) * 3
    assert spec.embedding_scale == math.sqrt(640) and spec.norm.offset == 0.0 and not model.permuted_qk
    assert spec.layers[0].post_norms and first(resolve("gemma3").path).scale == 1 / 16


def test_llama3_divisors(write_gguf: Callable[..., Path], llama_metadata: dict[str, Any]) -> None:
    path = write_gguf(llama_metadata, [("token_embd.weight", (32, 64), "f32"), ("rope_freqs.weight", (8,), "f32")])
    raw = bytearray(path.read_bytes())
    import struct

    raw[-32:] = struct.pack("<8f", *range(1, 9))
    path.write_bytes(raw)
    rope = first(path).rope
    assert rope is not None and rope.divisors == tuple(float(i) for i in range(1, 9)) and rope.scaling is None


def test_linear_scaling(write_gguf: Callable[..., Path], llama_metadata: dict[str, Any]) -> None:
    metadata = {**llama_metadata, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    rope = first(write_gguf(metadata)).rope
    assert rope is not None and rope.scaling == LinearScaling(4.0)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"general.architecture": "nonsense"}, UnknownArchitecture, "unknown architecture 'nonsense'; runnable: llama"),
        ({"general.architecture": "deepseek2"}, UnknownArchitecture, "not runnable yet"),
        ({"llama.block_count": None}, MissingField, "block_count"),
        ({"llama.block_count": 0}, BadValue, "block_count = 0"),
        ({"llama.attention.head_count_kv": 3}, BadValue, "4 is not a multiple of"),
        ({"llama.expert_count": 8}, BadValue, "expert_count = 8 is not supported"),
        ({"llama.vocab_size": None}, MissingField, "vocab_size"),
        ({"llama.rope.scaling.type": "yarn"}, BadValue, "rope scaling 'yarn'"),
        ({"llama.rope.dimension_count": 15}, BadValue, "rope.dimension_count = 15 must be even"),
        ({"split.count": 3}, UsageError, "one of 3 parts"),
    ],
)
def test_fails_closed(
    write_gguf: Callable[..., Path],
    llama_metadata: dict[str, Any],
    change: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    metadata = {key: value for key, value in {**llama_metadata, **change}.items() if value is not None}
    with pytest.raises(error, match=words):
        gguf_model(write_gguf(metadata))


def test_the_vocabulary_must_fit_the_embedding(write_gguf: Callable[..., Path], llama_metadata: dict[str, Any]) -> None:
    with pytest.raises(BadValue, match=r"32 tokens, but token_embd\.weight has 16 rows"):
        gguf_model(write_gguf(llama_metadata, [("token_embd.weight", (16, 64), "f32")]))
