"""``kvist info FILE``: types, sizes packed and unpacked, what fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvist.cli import contents
from kvist.cli.main import run
from packed_files import write_llama


def test_types_and_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_llama(tmp_path / "model.gguf", {"": "q4_0", "attn_v": "f16", "ffn_down": "q2_k"})
    assert run(["info", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    types = {row["type"]: row for row in found["types"]}
    assert set(types) == {"q4_0", "f16", "q2_k", "f32"}
    assert types["q4_0"]["packed_bytes"] == types["q4_0"]["file_bytes"]  # rows in whole strips here
    assert types["q4_0"]["bfloat16_bytes"] == 2 * types["q4_0"]["elements"]
    assert types["f16"]["elements"] == 2 * 128 * 256
    assert not types["q2_k"]["stays_packed"] and types["q2_k"]["packed_bytes"] == 2 * types["q2_k"]["elements"]
    assert found["weights"]["packed"]["bytes"] == sum(row["packed_bytes"] for row in types.values())
    assert found["weights"]["packed"]["context"] == 512  # the model's own limit
    assert run(["info", str(path)]) == 0
    text = capsys.readouterr().out
    assert "q2_k" in text and "unpacked when loaded" in text and "--weights packed" in text


def test_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_llama(tmp_path / "model.gguf", {"": "q4_0"})
    monkeypatch.setattr(contents, "available_memory", lambda: 1_500_000)
    assert run(["info", str(path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "--weights" in line]
    assert ["does not fit" in line for line in lines] == [False, True, True]


def test_no_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert run(["info", str(tmp_path)]) == 2
    assert "is no GGUF file" in capsys.readouterr().err
