from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvist.base.errors import BadValue, Corrupt, FormatError, Truncated, UsageError
from kvist.spec.gguf_file import LazyArray, read_gguf
from kvist.spec.gguf_types import GGML_TYPES
from kvist.spec.source import resolve


def test_types_are_those_of_the_format() -> None:
    for number, kind in GGML_TYPES.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (kind.elements, kind.nbytes), kind.name


def test_a_whole_file(llama_gguf: Path) -> None:
    file = read_gguf(llama_gguf)
    assert file.metadata["llama.block_count"] == 2
    assert file.tensors["blk.1.ffn_gate.weight"].shape == (96, 64)
    assert file.tensors["blk.1.ffn_gate.weight"].row_nbytes == 2 * 18
    last = max(file.tensors.values(), key=lambda t: t.offset)
    assert last.offset + last.nbytes <= file.size == llama_gguf.stat().st_size


def test_rows_are_read_where_they_lie(llama_gguf: Path) -> None:
    file = read_gguf(llama_gguf)
    whole = file.read_rows("blk.0.attn_k.weight")
    assert len(whole) == 32 * 68
    assert file.read_rows("blk.0.attn_k.weight", 3, 5) == whole[3 * 68 : 5 * 68]
    assert file.read_rows("blk.0.attn_k.weight", 7, 7) == b""
    with pytest.raises(BadValue, match=r"rows 0\.\.33 are outside 0\.\.32"):
        file.read_rows("blk.0.attn_k.weight", 0, 33)
    with pytest.raises(FormatError, match="no tensor 'nothing'"):
        file.read_rows("nothing")


def test_the_gguf_package_reads_the_same(llama_gguf: Path) -> None:
    from gguf import GGUFReader

    ours, theirs = read_gguf(llama_gguf), GGUFReader(llama_gguf)
    assert {t.name: (t.data_offset, t.n_bytes) for t in theirs.tensors} == {
        t.name: (t.offset, t.nbytes) for t in ours.tensors.values()
    }


def test_every_cut_is_noticed(llama_gguf: Path, tmp_path: Path) -> None:
    """Cut anywhere: an error of ours, never a short model. Only the padding after the last tensor may go."""
    raw = llama_gguf.read_bytes()
    file = read_gguf(llama_gguf)
    end = max(t.offset + t.nbytes for t in file.tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in {*range(0, file.data_offset, 7), file.data_offset, (file.data_offset + end) // 2, end - 1}:
        cut.write_bytes(raw[:size])
        with pytest.raises((Truncated, Corrupt)):
            read_gguf(cut)
    cut.write_bytes(raw[:end])
    assert read_gguf(cut).tensors.keys() == file.tensors.keys()


@pytest.mark.parametrize(
    ("position", "value", "error", "words"),
    [
        (0, b"GGML", FormatError, "this is no GGUF file"),
        (4, struct.pack("<I", 9), FormatError, "version 9"),
        (4, struct.pack(">I", 3), FormatError, "big-endian"),
        (8, struct.pack("<Q", 2**60), Truncated, "a header of"),
        (16, struct.pack("<Q", 2**63), Truncated, "a header of"),
        (24, struct.pack("<Q", 2**62), Truncated, "a metadata key"),
    ],
)
def test_damage(llama_gguf: Path, position: int, value: bytes, error: type[Exception], words: str) -> None:
    raw = bytearray(llama_gguf.read_bytes())
    raw[position : position + len(value)] = value
    llama_gguf.write_bytes(raw)
    with pytest.raises(error, match=words):
        read_gguf(llama_gguf)


def test_flipped_bytes_never_escape_as_other_errors(llama_gguf: Path, tmp_path: Path) -> None:
    raw = llama_gguf.read_bytes()
    header = read_gguf(llama_gguf).data_offset
    path = tmp_path / "flipped.gguf"
    outcomes = set()
    for position in range(0, header, 3):
        damaged = bytearray(raw)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            read_gguf(path)
            outcomes.add("read")
        except FormatError as error:
            outcomes.add(type(error).__name__)
    assert {"Truncated", "Corrupt", "FormatError"} <= outcomes


def test_contradictions(write_gguf: Callable[..., Path]) -> None:
    one = ("a.weight", (4, 32), "q8_0")
    with pytest.raises(Corrupt, match=r"tensor 'a\.weight' occurs twice"):
        read_gguf(write_gguf({}, [one, one]))
    with pytest.raises(Corrupt, match="alignment = 24"):
        read_gguf(write_gguf({"general.alignment": 24}, [one]))


def overlap(path: Path, name: str) -> None:
    raw = bytearray(path.read_bytes())
    at = raw.index(name.encode()) + len(name)
    dims = struct.unpack_from("<I", raw, at)[0]
    struct.pack_into("<Q", raw, at + 4 + 8 * dims + 4, 0)
    path.write_bytes(raw)


def test_overlapping_tensors(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf({}, [("a.weight", (4, 32), "q8_0"), ("b.weight", (4, 32), "q8_0")])
    overlap(path, "b.weight")
    with pytest.raises(Corrupt, match="overlap"):
        read_gguf(path)


def test_rows_that_blocks_do_not_divide(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf({}, [("a.weight", (2, 64), "q8_0")])
    raw = bytearray(path.read_bytes())
    at = raw.index(b"a.weight") + len("a.weight")
    struct.pack_into("<Q", raw, at + 4, 40)
    path.write_bytes(raw)
    with pytest.raises(Corrupt, match=r"rows of 'a\.weight' have 40 elements"):
        read_gguf(path)


def test_long_arrays_wait_until_they_are_asked_for(write_gguf: Callable[..., Path]) -> None:
    words = [f"word {i} é" for i in range(5000)]
    metadata: dict[str, Any] = {"tokens": words, "types": list(range(3000)), "short": [1, 2, 3], "flags": [True, False]}
    file = read_gguf(write_gguf(metadata))
    assert isinstance(file.metadata["tokens"], LazyArray)
    assert (file.count("tokens"), file.count("short"), file.count("absent")) == (5000, 3, None)
    assert file.array("tokens") == words
    assert file.array("types") == list(range(3000))
    assert file.metadata["flags"] == [True, False]
    with pytest.raises(FormatError, match="no array 'absent'"):
        file.array("absent")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0"])
def test_too_short(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(content)
    with pytest.raises(Truncated, match="too few"):
        read_gguf(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize(("alias", "tensors", "tokens"), [("smollm2", 272, 49152), ("gemma3", 236, 262144)])
def test_the_bundled_models(alias: str, tensors: int, tokens: int) -> None:
    path = resolve(alias).path
    best = min(timed(path) for _ in range(3))
    file = read_gguf(path)
    assert (len(file.tensors), file.count("tokenizer.ggml.tokens")) == (tensors, tokens)
    # The other reader takes seconds here; the bound leaves room for a busy machine.
    assert best < 1.0


def timed(path: Path) -> float:
    begin = time.perf_counter()
    read_gguf(path)
    return time.perf_counter() - begin
