"""A writer of small GGUF files, so that every field of a header can be set, and set wrongly."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvist.spec.gguf_types import BY_NAME, IDS

Tensor = tuple[str, tuple[int, ...], str]


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + text(value)
        case list() if value and isinstance(value[0], str):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        case list():
            form = "?" if value and isinstance(value[0], bool) else "i"
            return struct.pack("<IIQ", 9, 7 if form == "?" else 5, len(value)) + struct.pack(
                f"<{len(value)}{form}", *value
            )
    raise TypeError(value)


def gguf_bytes(metadata: dict[str, Any], tensors: list[Tensor], version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + typed(value) for key, value in metadata.items())
    offset, data = 0, b""
    for name, shape, kind in tensors:
        form = BY_NAME[kind]
        elements = 1
        for extent in shape:
            elements *= extent
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += text(name) + dims + struct.pack("<IQ", IDS[kind], offset)
        nbytes = elements // form.elements * form.nbytes
        data += bytes(i % 251 for i in range(nbytes)) + b"\0" * (-nbytes % 32)
        offset = len(data)
    return head + b"\0" * (-len(head) % 32) + data


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file and returns its path: (metadata, tensors)."""

    def write(metadata: dict[str, Any], tensors: list[Tensor] | None = None, name: str = "x.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(gguf_bytes(metadata, tensors or []))
        return path

    return write


LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 32,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def llama_tensors() -> list[Tensor]:
    found: list[Tensor] = [("token_embd.weight", (32, 64), "f32"), ("output_norm.weight", (64,), "f32")]
    for i in range(2):
        found += [
            (f"blk.{i}.attn_norm.weight", (64,), "f32"),
            (f"blk.{i}.attn_q.weight", (64, 64), "q8_0"),
            (f"blk.{i}.attn_k.weight", (32, 64), "q8_0"),
            (f"blk.{i}.attn_v.weight", (32, 64), "q8_0"),
            (f"blk.{i}.attn_output.weight", (64, 64), "q8_0"),
            (f"blk.{i}.ffn_norm.weight", (64,), "f32"),
            (f"blk.{i}.ffn_gate.weight", (96, 64), "q4_0"),
            (f"blk.{i}.ffn_up.weight", (96, 64), "q4_0"),
            (f"blk.{i}.ffn_down.weight", (64, 96), "q4_0"),
        ]
    return found


@pytest.fixture
def llama_metadata() -> dict[str, Any]:
    """The metadata of a tiny llama."""
    return dict(LLAMA)


@pytest.fixture
def llama_gguf(write_gguf: Callable[..., Path]) -> Path:
    """A whole tiny llama file."""
    return write_gguf(LLAMA, llama_tensors())
