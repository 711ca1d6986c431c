"""``kvist info FILE``: types, sizes packed and unpacked, what fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepseek_configs import V3
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


def test_a_folder_says_what_a_token_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(V3))
    assert run(["info", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] and found["cache_bytes_per_token"] == 61 * 576 * 2
    assert found["elements"] == 671_026_419_200
    assert found["cache"] == [{"layers": 61, "kind": "mla", "keeps": ["latent 512 + rope key 64 = 576 values"]}]
    for named in (tmp_path, path):
        assert run(["info", str(named)]) == 0
        text = capsys.readouterr().out
        assert "61 layers, each token leaves: latent 512 + rope key 64 = 576 values" in text
        assert "--weights bfloat16" in text and "1.2 TiB" in text


def test_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert run(["info", str(tmp_path)]) != 0
    assert "'model_type' is missing" in capsys.readouterr().err
