"""Files from strangers: whatever a header says, the answer is a model or a named error, soon and in little memory."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import gguf_files
from family_configs import CONFIGS, random_model
from kvist.base.errors import KvistError
from kvist.model.checkpoint import GgufCheckpoint, SafetensorsCheckpoint
from kvist.spec.cache_spec import cache_spec
from kvist.spec.from_config import model_spec
from kvist.spec.from_gguf import gguf_model
from kvist.spec.names import expected_tensors
from kvist.spec.source import resolve

SECONDS, BYTES = 5.0, 64 << 20  # of any one header; real ones take milliseconds and little
MOST_LAYERS = 10_000  # what a config may ask for before it is refused

# Values that have broken readers: wrong types, edges of integer types, empty and deep containers.
BAD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 3, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e308, -0.0, float("inf")]),
    st.floats(allow_nan=True),
    st.text(max_size=12),
    st.lists(st.one_of(st.integers(-3, 3), st.none(), st.text(max_size=3)), max_size=5),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "full_attention", "x"]), st.integers(-2, 2), max_size=2),
)


def outcome(read: Callable[[], Any]) -> Any:
    """What ``read`` gives, or None for a named error. Anything else fails, and so does slow or hungry work."""
    tracemalloc.start()
    begin = time.monotonic()
    try:
        return read()
    except KvistError as error:
        assert str(error)
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert time.monotonic() - begin < SECONDS
        assert peak < BYTES, f"{peak} bytes"


@pytest.mark.parametrize("kind", ["mistral window", "phi3 longrope", "gemma2", "falcon, two norms", "gpt2", "smollm3"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_config(kind: str, data: st.DataObject) -> None:
    config = json.loads(CONFIGS[kind]().to_json_string())
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(config)))
        if data.draw(st.booleans()):
            config[name] = data.draw(BAD)
        else:
            config.pop(name)
        if not config:
            break
    spec = outcome(lambda: model_spec(config))
    if spec is not None:
        assert 1 <= len(spec.layers) <= MOST_LAYERS
        outcome(lambda: len(spec.layers) < 100 and expected_tensors(spec))
    outcome(lambda: cache_spec(config))


@pytest.mark.parametrize(
    "content", ["[" * 200_000, '{"a":' * 100_000, "{}", "[]", '"x"', "nan", "", "\x00", '{"a": 1e999}']
)
def test_json_that_is_no_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").touch()
    assert outcome(lambda: model_spec(tmp_path)) is None
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert outcome(lambda: resolve(str(tmp_path)).shards()) is None


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    return gguf_files.save(random_model(CONFIGS["qwen3"]()), folder / "model.gguf").read_bytes()


NUMBERS = st.sampled_from([0, 1, 8, 9, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1])


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_gguf(whole_gguf: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Bytes flipped, numbers of eight bytes written anywhere into the header, the end cut off."""
    raw = bytearray(whole_gguf)
    header = min(len(raw) - 8, 4000)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header))
        match data.draw(st.sampled_from(["byte", "number", "short", "cut"])):
            case "byte":
                raw[at] = data.draw(st.integers(0, 255))
            case "number":
                raw[at : at + 8] = struct.pack("<Q", data.draw(NUMBERS))
            case "short":
                raw[at : at + 4] = struct.pack("<I", data.draw(NUMBERS) % 2**32)
            case "cut":
                del raw[data.draw(st.integers(0, len(raw) - 1)) :]
                break
        header = min(header, max(0, len(raw) - 8))
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    path.write_bytes(raw)

    def read() -> Any:
        model = gguf_model(path)
        checkpoint = GgufCheckpoint(model)
        return [checkpoint.vector(name) for name in checkpoint.names if name.endswith("norm")]

    outcome(read)


def test_the_whole_gguf_is_read(whole_gguf: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(whole_gguf)
    assert outcome(lambda: GgufCheckpoint(gguf_model(tmp_path / "model.gguf"))) is not None


@pytest.fixture(scope="module")
def plain() -> tuple[Any, bytes, bytes]:
    """A spec, and the header and the data of its safetensors file."""
    spec = model_spec(json.loads(CONFIGS["mistral"]().to_json_string()))
    path = Path("model.safetensors")
    return spec, *_file(spec, path)


def _file(spec: Any, path: Path) -> tuple[bytes, bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        tensors = {tensor.name: torch.zeros(tensor.shape) for tensor in expected_tensors(spec).values()}
        save_file(tensors, Path(folder) / path)
        raw = (Path(folder) / path).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return raw[8 : 8 + size], raw[8 + size :]


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_safetensors(
    plain: tuple[Any, bytes, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A header with any field replaced, of any stated length, over data of any length."""
    spec, header, values = plain
    entries = json.loads(header)
    name = data.draw(st.sampled_from(sorted(entries)))
    key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "itself", "nothing"]))
    wrong = data.draw(
        st.one_of(BAD, st.sampled_from(["F8_E4M3", "I64", "BOOL", "F64", "BF16", [2**62, 4], [0, 2**63]]))
    )
    if key == "itself":
        entries[name] = wrong
    elif key != "nothing" and isinstance(entries[name], dict):
        entries[name][key] = wrong
    text = json.dumps(entries).encode()
    size = data.draw(st.one_of(st.just(len(text)), NUMBERS))
    raw = struct.pack("<Q", size) + text + values[: data.draw(st.sampled_from([len(values), 0, 100]))]
    path = tmp_path_factory.mktemp("safetensors") / "model.safetensors"
    path.write_bytes(raw)

    def read() -> Any:
        checkpoint = SafetensorsCheckpoint(spec, (path,))
        return [checkpoint.vector(name) for name in checkpoint.names if name.endswith("norm")]

    outcome(read)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    """What a clone without Git LFS has in place of every large file."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4096\n"
    (tmp_path / "config.json").write_text(CONFIGS["mistral"]().to_json_string())
    for name in ("model.safetensors", "model.gguf"):
        (tmp_path / name).write_text(pointer)
    with pytest.raises(KvistError, match=r"model\.safetensors is a pointer of Git LFS.*git lfs pull"):
        SafetensorsCheckpoint(model_spec(tmp_path), resolve(str(tmp_path)).shards())
    with pytest.raises(KvistError, match=r"model\.gguf is a pointer of Git LFS.*git lfs pull"):
        gguf_model(tmp_path / "model.gguf")


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIGS["mistral"]().to_json_string())
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(KvistError, match=r"no \*\.safetensors"):
        resolve(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "pytorch_model.bin").read_bytes())
    spec = model_spec(tmp_path)
    assert outcome(lambda: SafetensorsCheckpoint(spec, resolve(str(tmp_path)).shards())) is None
