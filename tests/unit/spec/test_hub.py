"""The hub over HTTP, as a process of its own meets it: a server on the loopback, a cache folder, and nothing else."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess, run
from typing import Any

import pytest

from hub_server import COMMITS, Hub, running

# Only the small part of the package that resolves names: a process starts in a second. One answers for many names.
CODE = """
import json, sys
from kvist.base.errors import KvistError
from kvist.spec.source import resolve
for name in sys.argv[1:]:
    try:
        found = resolve(name)
        print(json.dumps([found.kind, found.name, *map(str, found.shards())]))
    except KvistError as error:
        print(json.dumps(str(error)))
"""
LARGE = bytes(range(256)) * 100_000  # 25 megabytes: half of it is more than one piece of a transfer
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": LARGE,
    "pytorch_model.bin": b"a pickle",
    "onnx/model.onnx": b"of another program",
    "original/consolidated.safetensors": b"twice the same",
    "README.md": b"words",
}
GGUF = {
    "README.md": b"words",
    "tiny-Q4_K_M.gguf": b"GGUF q4",
    "tiny-Q8_0.gguf": b"GGUF q8",
    "tiny-IQ4_XS.gguf": b"GGUF iq",
    "mmproj-Q8_0.gguf": b"GGUF eyes",
    "BF16/tiny-BF16-00001-of-00002.gguf": b"GGUF one",
    "BF16/tiny-BF16-00002-of-00002.gguf": b"GGUF two",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    repos = {"someone/tiny": FILES, "someone/tiny-GGUF": GGUF, "someone/words": {"README.md": b"words"}}
    with running(Hub(repos, gated=("someone/secret",))) as hub:
        yield hub


def ask(hub: Hub, cache: Path, *names: str, offline: bool = False, code: str = CODE) -> CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_XET": "1",
    }
    return run([sys.executable, "-c", code, *names], capture_output=True, text=True, env=environment, check=False)


def answers(hub: Hub, cache: Path, *names: str, offline: bool = False) -> list[Any]:
    """For each name [kind, name, files...], or what was said instead. Nothing else is printed: progress is for
    terminals."""
    done = ask(hub, cache, *names, offline=offline)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_only_what_runs_a_model_is_fetched_and_only_once(hub: Hub, tmp_path: Path) -> None:
    first, second = answers(hub, tmp_path, "someone/tiny", "someone/tiny")
    assert first[:2] == ["safetensors", "someone/tiny"] and Path(first[2]).read_bytes() == LARGE
    assert sorted(hub.fetched()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert first == second
    assert answers(hub, tmp_path, "someone/tiny", offline=True) == [first]


def test_a_transfer_that_breaks_off_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.broken.append("model.safetensors")
    (found,) = answers(hub, tmp_path, "someone/tiny")
    assert Path(found[2]).read_bytes() == LARGE
    ranges = [wanted for method, path, wanted in hub.asked if method == "GET" and path.endswith("model.safetensors")]
    assert len(ranges) == 2 and ranges[0] is None and ranges[1] is not None


def test_a_transfer_that_always_breaks_off_is_given_up_and_leaves_nothing_half_done(hub: Hub, tmp_path: Path) -> None:
    hub.broken += ["model.safetensors"] * 50
    (told,) = answers(hub, tmp_path, "someone/tiny")
    assert "the transfer broke off again and again" in told and "run this again, whole files stay" in told
    hub.broken.clear()
    before = len(hub.fetched())
    (found,) = answers(hub, tmp_path, "someone/tiny")
    assert Path(found[2]).read_bytes() == LARGE
    assert hub.fetched()[before:] == ["model.safetensors"]


def test_a_revision(hub: Hub, tmp_path: Path) -> None:
    for found in answers(hub, tmp_path, "someone/tiny@v1", f"someone/tiny@{COMMITS['v1']}"):
        assert COMMITS["v1"] in found[2]


NAMED = {
    "someone/tiny-GGUF:Q4_K_M": ["tiny-Q4_K_M.gguf"],
    "someone/tiny-GGUF:q8_0": ["tiny-Q8_0.gguf"],
    "someone/tiny-GGUF@v1:tiny-IQ4_XS.gguf": ["tiny-IQ4_XS.gguf"],
    "someone/tiny-GGUF:BF16": ["BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf"],
}


def test_gguf_files_of_a_repository(hub: Hub, tmp_path: Path) -> None:
    found = answers(hub, tmp_path, *NAMED)
    for (kind, told, *shards), (name, files) in zip(found, NAMED.items(), strict=True):
        assert (kind, told) == ("gguf", name)
        assert [Path(shard).read_bytes() for shard in shards] == [GGUF[file] for file in files]
    assert sorted(hub.fetched()) == sorted(file for files in NAMED.values() for file in files)
    assert answers(hub, tmp_path, *NAMED, offline=True) == found


REFUSED = {
    "someone/tiny-GGUF:Q5_K_M": "names no GGUF file of the repository: it has .*tiny-Q4_K_M.gguf",
    "someone/tiny-GGUF:tiny": "names 4 models: .*write one of them after the colon",
    "someone/tiny-GGUF": "has no config.json: it has GGUF files: write someone/tiny-GGUF:FILE with one of .*Q4",
    "someone/words": "has no config.json: take another",
    "someone/tiny:Q4_K_M": "names no GGUF file of the repository: it has none",
    "someone/else": "there is no such repository, or it is private",
    "someone/else:Q4_K_M": "there is no such repository, or it is private",
    "someone/tiny@v9": "there is no such revision",
    "someone/tiny-GGUF@v9:Q4_K_M": "there is no such revision",
    "someone/secret": "the repository is gated",
    "someone/secret:Q4_K_M": "the repository is gated",
}


def test_what_cannot_be_had_is_told(hub: Hub, tmp_path: Path) -> None:
    for told, words in zip(answers(hub, tmp_path, *REFUSED), REFUSED.values(), strict=True):
        assert isinstance(told, str) and "\n" not in told and re.search(words, told), told
    assert hub.fetched() == []


@pytest.mark.parametrize("offline", [False, True])
def test_nobody_there(tmp_path: Path, offline: bool) -> None:
    nobody = Hub({}, url="http://127.0.0.1:9")
    for told in answers(nobody, tmp_path, "someone/tiny", "someone/tiny-GGUF:Q4_K_M", offline=offline):
        assert "the hub cannot be reached" in told and "give a folder or a .gguf file" in told


def test_a_plan_fetches_the_config_and_no_weights(hub: Hub, tmp_path: Path) -> None:
    code = "import sys; from kvist.cli.main import run; sys.exit(run(['plan', sys.argv[1], '--json']))"
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    hub.repos["someone/tiny"] = {**FILES, "config.json": json.dumps(config).encode()}
    done = ask(hub, tmp_path, "someone/tiny@v1", code=code)
    assert done.returncode == 0, done.stderr
    assert hub.fetched() == ["config.json"]
    done = ask(hub, tmp_path, "someone/tiny-GGUF:Q4_K_M", code=code)
    assert done.returncode == 2 and hub.fetched() == ["config.json"]
    assert "a plan fetches no weights: fetch it (kvist run, or hf download)" in done.stderr
    # One that is here can be planned: what is wrong with it is then its content.
    answers(hub, tmp_path, "someone/tiny-GGUF:Q4_K_M")
    done = ask(hub, tmp_path, "someone/tiny-GGUF:q4_k_m", code=code, offline=True)
    assert done.returncode == 2 and "7 bytes are too few for a GGUF header" in done.stderr
