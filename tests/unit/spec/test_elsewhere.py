"""Models of other programs: a hub cache laid out as the hub does it, what ollama pulled, and files in parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvist.base.errors import Corrupt, UsageError
from kvist.spec.elsewhere import hub_path, ollama_file
from kvist.spec.from_gguf import gguf_model
from kvist.spec.gguf_split import read_model_file, split_parts
from kvist.spec.source import resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one repository at one commit, and no network."""
    from huggingface_hub import constants

    root = tmp_path / "hub"
    repo = root / "models--someone--tiny"
    snapshot, blobs = repo / "snapshots" / COMMIT, repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for name, content in (("config.json", b"{}"), ("model.safetensors", b"weights")):
        blob = blobs / f"blob-of-{name}"
        blob.write_bytes(content)
        (snapshot / name).symlink_to(blob)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return root


@pytest.mark.parametrize("name", ["someone/tiny", "someone/tiny@main", f"someone/tiny@{COMMIT}"])
def test_a_repository_of_the_hub_cache(hub: Path, name: str) -> None:
    found = resolve(name)
    assert (found.kind, found.name) == ("safetensors", name)
    assert found.path == hub / "models--someone--tiny" / "snapshots" / COMMIT
    # The links lead out of the folder, into the hub's blobs: that is how its cache is made.
    assert [shard.read_bytes() for shard in found.shards()] == [b"weights"]


@pytest.mark.parametrize("name", ["someone/else", "someone/tiny@v2", f"someone/tiny@{OTHER}"])
def test_without_a_network_the_remedy_is_told(hub: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"cannot get '{name}'.*cannot be reached.*fetch it once while online"):
        resolve(name)


def test_a_folder_comes_before_a_hub_id(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "someone" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    assert resolve("someone/tiny").path == Path("someone/tiny")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("GatedRepoError", "gated: accept its terms"),
        ("RepositoryNotFoundError", "no such repository, or it is private"),
        ("RevisionNotFoundError", "no such revision"),
    ],
)
def test_what_the_hub_refuses_is_explained(hub: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def refuse(*args: Any, **settings: Any) -> str:
        raise getattr(errors, kind).__new__(getattr(errors, kind), "refused")  # its answer would need a connection

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UsageError, match=words):
        hub_path("someone/tiny")


def test_names_that_are_no_hub_ids() -> None:
    for name in ("no_such_model_at_all", "a/b/c", "../x", "/etc/passwd", "a/b@", "~x/y"):
        with pytest.raises(UsageError, match=r"no such model|is neither a"):
            resolve(name)


def manifest(root: Path, parts: str, layers: Any) -> None:
    path = root / "manifests" / parts
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"layers": layers}) if not isinstance(layers, str) else layers)


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    (tmp_path / "blobs").mkdir()
    return tmp_path


def weights(digest: str) -> list[dict[str, str]]:
    other = {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "0" * 64}
    return [other, {"mediaType": "application/vnd.ollama.image.model", "digest": digest}]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("tiny", "registry.ollama.ai/library/tiny/latest"),
        ("tiny:1b", "registry.ollama.ai/library/tiny/1b"),
        ("me/tiny:1b", "registry.ollama.ai/me/tiny/1b"),
        ("hf.co/me/tiny:Q4_K_M", "hf.co/me/tiny/Q4_K_M"),
    ],
)
def test_a_model_of_ollama(ollama: Path, name: str, parts: str) -> None:
    digest = "a" * 64
    manifest(ollama, parts, weights(f"sha256:{digest}"))
    blob = ollama / "blobs" / f"sha256-{digest}"
    with pytest.raises(UsageError, match=f"is missing, which ollama's '{name}' needs"):
        resolve(f"ollama:{name}")
    blob.write_bytes(b"GGUF")
    found = resolve(f"ollama:{name}")
    assert (found.kind, found.path, found.name) == ("gguf", blob, name)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../b", "a/b/c/d", "", "tiny:../x", "tiny:a/b"])
def test_no_name_leads_out_of_ollama(ollama: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is no ollama model"):
        ollama_file(name)


@pytest.mark.parametrize("digest", ["sha256:../../../etc/passwd", "sha256:short", "md5:" + "a" * 64, 3, None])
def test_no_digest_leads_out_of_the_blobs(ollama: Path, digest: Any) -> None:
    manifest(ollama, "registry.ollama.ai/library/tiny/latest", weights(digest))
    with pytest.raises(UsageError, match="files of weights"):
        ollama_file("tiny")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"layers": 3}', '{"layers": [{}]}', "[" * 100_000])
def test_a_manifest_that_is_none(ollama: Path, content: str) -> None:
    manifest(ollama, "registry.ollama.ai/library/tiny/latest", content)
    with pytest.raises(Corrupt, match="is no ollama manifest"):
        ollama_file("tiny")


def test_a_model_that_ollama_has_not(ollama: Path) -> None:
    with pytest.raises(UsageError, match="ollama pull tiny"):
        resolve("ollama:tiny")


def split(folder: Path, count: int = 3, **changes: int) -> list[Path]:
    """A model of one tensor for each part."""
    paths = []
    for number in range(count):
        path = folder / f"tiny-{number + 1:05d}-of-{count:05d}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", changes.get(f"no{number}", number))
        writer.add_uint16("split.count", changes.get("stated", count))
        if number == 0:
            writer.add_int32("split.tensors.count", changes.get("total", count))
            writer.add_block_count(1)
        name = f"blk.0.part{changes.get('twice', number) if number else 0}.weight"
        writer.add_tensor(name, np.full((2, 32), float(number), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def test_parts_are_read_as_one(tmp_path: Path) -> None:
    paths = split(tmp_path)
    for path in paths:
        assert split_parts(path) == tuple(paths)
        assert resolve(str(path)).path == paths[0]
        assert resolve(str(path)).shards() == tuple(paths)
    file = read_model_file(paths[1])
    assert file.metadata["llama.block_count"] == 1 and file.size == sum(p.stat().st_size for p in paths)
    for number in range(3):
        values = np.frombuffer(file.read_rows(f"blk.0.part{number}.weight", 1), np.float32)
        assert (values == number).all() and len(values) == 32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"no1": 2}, "says it is part 2 of 3, expected 1 of 3"),
        ({"total": 9}, "hold 3 tensors, the first says 9"),
        ({"twice": 0}, "stands in an earlier part too"),
        ({"stated": 4}, "one of 4 parts, but its name says 3"),
    ],
)
def test_parts_that_do_not_belong_together(tmp_path: Path, changes: dict[str, int], words: str) -> None:
    paths = split(tmp_path, **changes)
    with pytest.raises((Corrupt, UsageError), match=words):
        gguf_model(paths[0])


def test_parts_that_are_not_there(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[2].unlink()
    with pytest.raises(UsageError, match=r"parts of this model are not there: tiny-00003-of-00003\.gguf"):
        resolve(str(paths[0]))
    with pytest.raises(UsageError, match="part 7 of 3"):
        split_parts(tmp_path / "tiny-00007-of-00003.gguf")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "sub/model.safetensors", ".."])
def test_an_index_may_not_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(Corrupt, match="names a file outside its folder"):
        resolve(str(tmp_path))
