"""Sizes, lengths, logs, devices and models as users give them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from kvist.base.errors import FormatError, KvistError, UsageError
from kvist.plan.calibrate import read_log
from kvist.plan.compare import compare
from kvist.plan.device import DEVICES, find_device
from kvist.plan.inputs import load_spec
from kvist.plan.lengths import plan_lengths, read_lengths
from kvist.plan.plan import plan
from kvist.plan.sizes import parse_count, parse_size, show_bytes

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "hidden_size": 512,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("80GB", 80 * 10**9), ("80 g", 80 * 2**30), ("1.5k", 1536), ("4_096", 4096), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-3", "0", "3 parsecs", "1e9", "9999999TiB", "nan", "3GiBGiB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="--memory is"):
        parse_size(text, "--memory")


def test_counts() -> None:
    assert (parse_count("32k"), parse_count("1m"), parse_count("100")) == (32768, 2**20, 100)
    assert show_bytes(3 * 2**30) == "3.00 GiB" and show_bytes(12) == "12 B"


@pytest.mark.parametrize(
    "text", ["10\n20\n30\n", "[10, 20, 30]", "length,other\n10,1\n20,1\n30,1\n", "# c\n10\n\n20\n30"]
)
def test_lengths(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths"
    path.write_text(text)
    assert read_lengths(path) == [10, 20, 30]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no lengths"),
        ("10\n-5\n", "line 2: '-5' is no length"),
        ("[1, true]", "item 1"),
        ("10\nx\n", "line 2"),
    ],
)
def test_bad_lengths(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_lengths(path)


def test_users_by_a_distribution() -> None:
    engine = plan(LLAMA, block_size=16).engine
    unit = engine.allocated(16, 1)
    same = plan_lengths(engine, [16] * 100, 1000 * unit)
    assert (same.users_on_average, same.users_at_99, same.deviation_bytes) == (1000, 1000, 0.0)
    spread = plan_lengths(engine, [16, 16 * 9], 1000 * unit)
    assert (spread.p50, spread.p95, spread.longest, spread.mean_bytes) == (16, 144, 144, 5 * unit)
    assert spread.users_on_average == 200
    assert spread.users_at_99 is not None and 100 < spread.users_at_99 < 200
    n = spread.users_at_99
    assert n * spread.mean_bytes + 2.33 * spread.deviation_bytes * n**0.5 <= 1001 * unit


VLLM_LOG = """
INFO model weights take 14.99GiB; non_torch_memory takes 0.14GiB; PyTorch activation peak memory takes 1.22GiB;
INFO Available KV cache memory: 0.50 GiB
INFO GPU KV cache size: 65,536 tokens
INFO Maximum concurrency for 4,096 tokens per request: 16.00x
"""


def test_a_vllm_log_calibrates_and_compares() -> None:
    log = read_log(VLLM_LOG)
    assert (log.engine, log.kv_bytes, log.kv_tokens) == ("vllm", 2**29, 65536)
    assert log.other_bytes == int((0.14 + 1.22) * 2**30)
    found = {item.what: item for item in compare(plan(LLAMA, engine="vllm"), log)}
    assert found["tokens in the cache"].off == 0.0
    assert found["concurrency"].off == 0.0
    assert "off by +0.00%" in found["concurrency"].sentence


def test_other_logs() -> None:
    llama = read_log(
        "llama_kv_cache: size =  112.00 MiB (  4096 cells,  28 layers,  1/1 seqs), K (f16): 56.00 MiB\n"
        "llama_context:  CPU compute buffer size =   300.50 MiB\n"
    )
    assert (llama.engine, llama.kv_bytes, llama.other_bytes) == ("llama.cpp", 112 * 2**20, int(300.5 * 2**20))
    sglang = read_log("KV Cache is allocated. #tokens: 2454421, K size: 80.32 GB, V size: 80.31 GB")
    assert (sglang.engine, sglang.kv_tokens, sglang.kv_bytes) == ("sglang", 2454421, int(160.63 * 2**30))
    with pytest.raises(UsageError, match="no start-up line that is known"):
        read_log("hello")


def test_devices() -> None:
    assert all(device.bandwidth and device.source for device in DEVICES.values())
    assert find_device("RTX 4090").name == "rtx-4090"
    made = plan({**LLAMA, "vocab_size": 100, "intermediate_size": 512}, device="h100", ctx_size=4096)
    assert made.weights_bytes is not None and made.device is not None
    point = made.roofline[-1]
    assert point.ctx == 4096
    assert point.seconds * 3350e9 == pytest.approx(made.weights_bytes + made.sequence_bytes)
    speeds = [p.tokens_per_second for p in made.roofline]
    assert speeds == sorted(speeds, reverse=True)


def test_this_machine_is_measured() -> None:
    device = find_device("this")
    assert device.status == "measured" and device.memory and device.bandwidth
    assert 1e8 < device.bandwidth < 1e13


def test_models_by_path(tmp_path: Path) -> None:
    config = {**LLAMA, "vocab_size": 10, "intermediate_size": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 99}
    folder = tmp_path / "somemodel"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    name, spec = load_spec(folder)
    assert name == "somemodel" and spec.weights_source.startswith("exact") and spec.parameters is not None
    assert spec.weights_bytes == 2 * spec.parameters
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + b"x" * 1000)
    assert load_spec(folder)[1].weights_bytes == 1000
    assert load_spec(folder / "config.json")[0] == "somemodel"
    assert load_spec(config)[0] == "config"


def test_weights_that_are_not_there_are_not_counted(tmp_path: Path) -> None:
    """What a clone without Git LFS left: its first bytes read as a length would make the weights negative."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    _, spec = load_spec(tmp_path)
    assert spec.weights_bytes is None or spec.weights_bytes > 0
    assert "model.safetensors is not a whole safetensors file" in spec.notes


def test_models_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"1234567890")
    with pytest.raises(FormatError, match=r"neither a GGUF file nor a config\.json"):
        load_spec(tmp_path / "x.bin")
    with pytest.raises(UsageError, match=r"has no config\.json: give a folder that has one"):
        load_spec(tmp_path)
    with pytest.raises(UsageError, match="the model's name is empty"):
        load_spec("")
    with pytest.raises(UsageError, match="ollama has no model 'absent' here"):
        load_spec("ollama:absent")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "config.json").write_text("{}")
    (tmp_path / "part" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(FormatError, match=r"did you mean its folder, .*part\?"):
        load_spec(tmp_path / "part" / "model.safetensors")
    with pytest.raises(UsageError, match="no such model: 'absent'"):
        load_spec("absent")
    with pytest.raises(KvistError, match=r"cannot get 'nobody/nothing' from the hub"):
        load_spec("nobody/nothing")
