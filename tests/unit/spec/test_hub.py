"""The hub over HTTP, as a process of its own meets it: a server on the loopback, a cache folder, and nothing else."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess, run

import pytest

from hub_server import COMMITS, Hub, running

# Only the small part of the package that resolves a name: the process starts in a fraction of a second.
CODE = """
import sys
from kvist.base.errors import KvistError
from kvist.spec.source import resolve
try:
    found = resolve(sys.argv[1])
    print(found.kind, found.name, *found.shards(), sep="\\n")
except KvistError as error:
    sys.exit(str(error))
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


def ask(hub: Hub, cache: Path, name: str, *, offline: bool = False, code: str = CODE) -> CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_XET": "1",
    }
    return run([sys.executable, "-c", code, name], capture_output=True, text=True, env=environment, check=False)


def test_only_what_runs_a_model_is_fetched_and_only_once(hub: Hub, tmp_path: Path) -> None:
    first = ask(hub, tmp_path, "someone/tiny")
    assert first.returncode == 0, first.stderr
    kind, name, shard = first.stdout.split("\n")[:3]
    assert (kind, name) == ("safetensors", "someone/tiny") and Path(shard).read_bytes() == LARGE
    assert sorted(hub.fetched()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert first.stderr == ""  # progress is for terminals
    second = ask(hub, tmp_path, "someone/tiny")
    assert second.stdout == first.stdout and len(hub.fetched()) == 3
    assert ask(hub, tmp_path, "someone/tiny", offline=True).stdout == first.stdout


def test_a_transfer_that_breaks_off_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.broken.append("model.safetensors")
    done = ask(hub, tmp_path, "someone/tiny")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.split("\n")[2]).read_bytes() == LARGE
    ranges = [wanted for method, path, wanted in hub.asked if method == "GET" and path.endswith("model.safetensors")]
    assert len(ranges) == 2 and ranges[0] is None and ranges[1] is not None


def test_a_transfer_that_always_breaks_off_is_given_up_and_leaves_nothing_half_done(hub: Hub, tmp_path: Path) -> None:
    hub.broken += ["model.safetensors"] * 50
    done = ask(hub, tmp_path, "someone/tiny")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "the transfer broke off again and again" in done.stderr and "run this again, whole files stay" in done.stderr
    hub.broken.clear()
    before = len(hub.fetched())
    done = ask(hub, tmp_path, "someone/tiny")
    assert done.returncode == 0 and Path(done.stdout.split("\n")[2]).read_bytes() == LARGE
    assert hub.fetched()[before:] == ["model.safetensors"]


@pytest.mark.parametrize("revision", ["v1", COMMITS["v1"]])
def test_a_revision(hub: Hub, tmp_path: Path, revision: str) -> None:
    done = ask(hub, tmp_path, f"someone/tiny@{revision}")
    assert done.returncode == 0 and COMMITS["v1"] in done.stdout


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("someone/tiny-GGUF:Q4_K_M", ["tiny-Q4_K_M.gguf"]),
        ("someone/tiny-GGUF:q8_0", ["tiny-Q8_0.gguf"]),
        ("someone/tiny-GGUF@v1:tiny-IQ4_XS.gguf", ["tiny-IQ4_XS.gguf"]),
        ("someone/tiny-GGUF:BF16", ["BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf"]),
    ],
)
def test_a_gguf_file_of_a_repository(hub: Hub, tmp_path: Path, name: str, files: list[str]) -> None:
    done = ask(hub, tmp_path, name)
    assert done.returncode == 0, done.stderr
    kind, told, *shards = done.stdout.strip().split("\n")
    assert (kind, told) == ("gguf", name)
    assert [Path(shard).read_bytes() for shard in shards] == [GGUF[file] for file in files]
    assert sorted(hub.fetched()) == files
    again = ask(hub, tmp_path, name, offline=True)
    assert again.stdout == done.stdout, again.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("someone/tiny-GGUF:Q5_K_M", "names no GGUF file of the repository: it has .*tiny-Q4_K_M.gguf"),
        ("someone/tiny-GGUF:tiny", "names 4 models: .*write one of them after the colon"),
        ("someone/tiny-GGUF", "has no config.json: it has GGUF files: write someone/tiny-GGUF:FILE with one of .*Q4"),
        ("someone/words", "has no config.json: take another"),
        ("someone/tiny:Q4_K_M", "names no GGUF file of the repository: it has none"),
        ("someone/else", "there is no such repository, or it is private"),
        ("someone/else:Q4_K_M", "there is no such repository, or it is private"),
        ("someone/tiny@v9", "there is no such revision"),
        ("someone/tiny-GGUF@v9:Q4_K_M", "there is no such revision"),
        ("someone/secret", "the repository is gated"),
        ("someone/secret:Q4_K_M", "the repository is gated"),
    ],
)
def test_what_cannot_be_had_is_one_line(hub: Hub, tmp_path: Path, name: str, words: str) -> None:
    done = ask(hub, tmp_path, name)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert re.search(words, done.stderr), done.stderr
    assert hub.fetched() == [] or name == "someone/words"


@pytest.mark.parametrize("name", ["someone/tiny", "someone/tiny-GGUF:Q4_K_M"])
def test_nobody_there(tmp_path: Path, name: str) -> None:
    for url, offline in (("http://127.0.0.1:9", False), ("http://127.0.0.1:9", True)):
        done = ask(Hub({}, url=url), tmp_path, name, offline=offline)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert "the hub cannot be reached" in done.stderr and "give a folder or a .gguf file" in done.stderr


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
    assert ask(hub, tmp_path, "someone/tiny-GGUF:Q4_K_M").returncode == 0
    done = ask(hub, tmp_path, "someone/tiny-GGUF:q4_k_m", code=code, offline=True)
    assert done.returncode == 2 and "7 bytes are too few for a GGUF header" in done.stderr
