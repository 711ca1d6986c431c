"""Small vocabularies written as real GGUF files and as real tokenizer.json folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvist.spec.gguf_file import GgufFile, read_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPM = [
    *(("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<end_of_turn>", 0.0, CONTROL)),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    *(("  ", 0.0, USER_DEFINED), ("\n\n", 0.0, USER_DEFINED)),
    *(
        (piece, -float(rank), NORMAL)
        for rank, piece in enumerate(["ab", "\u2581a", "\u2581ab", "abc", "bc", "\u2581c"])
    ),
    *((piece, -100.0, NORMAL) for piece in "\u2581abcd\n"),
]


def write_gguf(path: Path, tokenizer: dict[str, Any], template: str | None = None) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    adders: list[tuple[type, Callable[[str, Any], None]]] = [
        (bool, writer.add_bool),
        (int, writer.add_uint32),
        (str, writer.add_string),
        (list, writer.add_array),
    ]
    for key, value in tokenizer.items():
        next(add for kind, add in adders if isinstance(value, kind))(f"tokenizer.ggml.{key}", value)
    if template is not None:
        writer.add_chat_template(template)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)


def spm_header(**changes: Any) -> dict[str, Any]:
    tokens, scores, types = (list(column) for column in zip(*SPM, strict=True))
    header = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {key: value for key, value in (header | changes).items() if value is not None}


def bpe_header(**changes: Any) -> dict[str, Any]:
    from kvist.text.spelling import byte_alphabet

    tokens = ["<|endoftext|>", "<|im_end|>", "<think>", *byte_alphabet(), "ab", "\u0120ab", "12", "abc"]
    types = [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 3)
    header = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": types,
        "merges": ["a b", "\u0120 ab", "1 2", "ab c"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {key: value for key, value in (header | changes).items() if value is not None}


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvist" / "vocabulary"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as `save_pretrained` leaves it: SentencePiece-like tokenizer.json and its settings."""
    pieces = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "ab"])}
    encoder = Tokenizer(models.BPE(vocab=pieces, merges=[("\u2581", "a"), ("a", "b")], unk_token="<unk>"))
    encoder.normalizer = normalizers.Replace(" ", "\u2581")
    encoder.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    encoder.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    encoder.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<s>", "</s>")])
    encoder.enable_truncation(4)
    target = tmp_path / "model"
    target.mkdir()
    encoder.save(str(target / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target
