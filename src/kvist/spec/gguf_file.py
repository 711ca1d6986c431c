"""A small streaming reader of GGUF headers: bounds are checked before anything is allocated.

Vocabularies are walked over, not decoded; they are decoded when someone asks for them. Gemma 3's header (262,144 token
strings) is read in about a tenth of a second.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvist.base.errors import BadValue, Corrupt, FormatError, Truncated, UsageError
from kvist.spec.gguf_types import GGML_TYPES, GgmlType

_MAGIC = b"GGUF"
LFS_POINTER = b"version https://git-lfs"  # what a clone without Git LFS has in place of every large file
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
# Arrays up to this many elements are decoded with the header; longer ones (vocabularies) when they are asked for.
_EAGER = 1024


@dataclass(frozen=True, slots=True)
class LazyArray:
    """An array of the metadata that stays in the file until asked for."""

    element: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the file: shape [rows.., columns], element type, absolute byte offset and size in bytes.

    ``part``: the file that holds it, where a model is split over several.
    """

    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    offset: int
    nbytes: int
    part: Path | None = None

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row (the last axis)."""
        return int(self.shape[-1] // self.kind.elements * self.kind.nbytes)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file: scalars, strings and short arrays decoded, long arrays as LazyArray."""

    path: Path
    version: int
    size: int
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, TensorInfo] = field(repr=False)
    data_offset: int

    def array(self, key: str) -> list[Any]:
        """The whole array under ``key`` (strings decoded as UTF-8). FormatError when there is none."""
        value = self.metadata.get(key)
        if isinstance(value, list):
            return value
        if not isinstance(value, LazyArray):
            raise FormatError(f"{self.path}: no array {key!r} in the metadata")
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data, self.path, value.offset).elements(value.element, value.count)

    def count(self, key: str) -> int | None:
        """Number of elements of the array under ``key``, without decoding it; None when there is no such array."""
        value = self.metadata.get(key)
        return value.count if isinstance(value, LazyArray) else len(value) if isinstance(value, list) else None

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The stored bytes of rows start..stop of tensor ``name`` (all leading axes flattened into rows).

        Read with pread: nothing stays mapped, so the process does not grow by the file. Truncated when the file shrank.
        """
        info = self.tensors.get(name)
        if info is None:
            raise FormatError(f"{self.path}: no tensor {name!r}")
        rows = info.nbytes // info.row_nbytes
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise BadValue(f"{name}: rows {start}..{stop} are outside 0..{rows}")
        wanted, parts, offset = (stop - start) * info.row_nbytes, [], info.offset + start * info.row_nbytes
        with (info.part or self.path).open("rb") as file:
            while wanted:
                part = os.pread(file.fileno(), min(wanted, 1 << 30), offset)
                if not part:
                    raise Truncated(f"{self.path}: {wanted} bytes of tensor {name!r} are missing at offset {offset}")
                parts.append(part)
                wanted -= len(part)
                offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _Cursor:
    """A position in the mapped file; every step checks what is left before it reads."""

    __slots__ = ("data", "path", "position", "size")

    def __init__(self, data: mmap.mmap, path: Path, position: int = 0) -> None:
        self.data, self.path, self.position, self.size = data, path, position, len(data)

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > self.size - self.position:
            raise Truncated(
                f"{self.path}: {what} needs {nbytes} bytes at offset {self.position}, but the file ends at {self.size};"
                " copy or download it again"
            )

    def scalar(self, kind: int, what: str) -> Any:
        form = _SCALARS[kind]
        self.need(form.size, what)
        (value,) = form.unpack_from(self.data, self.position)
        self.position += form.size
        return value

    def text(self, what: str) -> str:
        length = self.scalar(10, f"length of {what}")
        self.need(length, what)
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Corrupt(f"{self.path}: {what} at offset {self.position - length} is not UTF-8") from error

    def elements(self, element: int, count: int) -> list[Any]:
        """``count`` elements, strings decoded leniently: vocabularies hold raw bytes."""
        if element != _STRING:
            form = _SCALARS[element]
            self.need(form.size * count, "array")
            values = struct.unpack_from(f"<{count}{form.format[-1]}", self.data, self.position)
            self.position += form.size * count
            return list(values)
        data, position, end, strings = self.data, self.position, self.size, []
        for _ in range(count):
            start = position + 8
            position = start + int.from_bytes(data[position:start], "little")
            if position > end:
                raise Truncated(f"{self.path}: a string of an array ends at {position}, the file at {end}")
            strings.append(data[start:position].decode("utf-8", errors="replace"))
        self.position = position
        return strings

    def skip(self, element: int, count: int, what: str) -> None:
        if element != _STRING:
            self.need(_SCALARS[element].size * count, what)
            self.position += _SCALARS[element].size * count
            return
        self.need(8 * count, what)
        data, position, end = self.data, self.position, self.size
        number = int.from_bytes
        for _ in range(count):
            position += 8 + number(data[position : position + 8], "little")
            if position > end:
                raise Truncated(f"{self.path}: a string of {what} ends at {position}, but the file ends at {end}")
        self.position = position

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(kind, what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            raise Corrupt(f"{self.path}: {what} has the unknown value type {kind}")
        element, count = self.scalar(4, what), self.scalar(10, what)
        if element != _STRING and element not in _SCALARS:
            raise Corrupt(f"{self.path}: {what} is an array of the unsupported element type {element}")
        start = self.position
        if count <= _EAGER:
            self.need(count * (8 if element == _STRING else _SCALARS[element].size), what)
            return self.elements(element, count)
        self.skip(element, count, what)
        return LazyArray(element, count, start)


def read_gguf(path: str | Path) -> GgufFile:
    """Read the header of the GGUF file at ``path``.

    Raises UsageError (no such file), FormatError (not GGUF, unsupported version), Truncated or Corrupt.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    size = path.stat().st_size
    if size < 24:
        raise Truncated(f"{path}: {size} bytes are too few for a GGUF header (24); copy or download it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _header(_Cursor(data, path), size)


def _header(cursor: _Cursor, size: int) -> GgufFile:
    path = cursor.path
    magic = cursor.data[:4]
    if cursor.data[: len(LFS_POINTER)] == LFS_POINTER:
        raise FormatError(f"{path} is a pointer of Git LFS, not the file itself: `git lfs pull` fetches that")
    if magic != _MAGIC:
        raise FormatError(f"{path}: starts with {magic!r}, not {_MAGIC!r}: this is no GGUF file")
    cursor.position = 4
    version = cursor.scalar(4, "version")
    if version not in (2, 3):
        hint = "a big-endian file" if version & 0xFFFF == 0 else "an unknown version"
        raise FormatError(f"{path}: GGUF version {version} ({hint}); versions 2 and 3, little-endian, can be read")
    num_tensors, num_pairs = cursor.scalar(10, "tensor count"), cursor.scalar(10, "metadata count")
    # The smallest pair takes 13 bytes, the smallest tensor entry 32: counts beyond that cannot be true.
    cursor.need(13 * num_pairs + 32 * num_tensors, f"a header of {num_pairs} pairs and {num_tensors} tensors")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise Corrupt(f"{path}: metadata key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.scalar(4, key), key)
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise Corrupt(f"{path}: general.alignment = {alignment!r} must be a power of two of at least 8")
    data_offset = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, relative in entries:
        if name in tensors:
            raise Corrupt(f"{path}: tensor {name!r} occurs twice")
        tensors[name] = _checked(path, size, data_offset, alignment, (name, shape, kind, relative))
    _refuse_overlaps(path, tensors)
    return GgufFile(path, version, size, metadata, tensors, data_offset)


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text("a tensor name")
    dims = cursor.scalar(4, f"dimensions of {name}")
    if not 1 <= dims <= _MAX_DIMS:
        raise Corrupt(f"{cursor.path}: tensor {name!r} has {dims} dimensions, allowed are 1..{_MAX_DIMS}")
    # GGUF stores the fastest axis first; we write shapes with the fastest axis last.
    shape = tuple(reversed([cursor.scalar(10, f"shape of {name}") for _ in range(dims)]))
    return name, shape, cursor.scalar(4, f"type of {name}"), cursor.scalar(10, f"offset of {name}")


def _checked(
    path: Path, size: int, base: int, alignment: int, entry: tuple[str, tuple[int, ...], int, int]
) -> TensorInfo:
    name, shape, kind_id, relative = entry
    kind = GGML_TYPES.get(kind_id)
    if kind is None:
        raise FormatError(f"{path}: tensor {name!r} has the unknown element type {kind_id}")
    elements = 1
    for extent in shape:
        elements *= extent
    if elements == 0:
        raise Corrupt(f"{path}: tensor {name!r} is empty (shape {list(shape)})")
    if shape[-1] % kind.elements:
        raise Corrupt(
            f"{path}: rows of {name!r} have {shape[-1]} elements, not a multiple of {kind.elements} ({kind.name})"
        )
    if relative % alignment:
        raise Corrupt(f"{path}: tensor {name!r} starts at {relative}, not a multiple of {alignment}")
    nbytes = elements // kind.elements * kind.nbytes
    if base + relative + nbytes > size:
        raise Truncated(
            f"{path}: tensor {name!r} ends at {base + relative + nbytes}, but the file ends at {size};"
            " copy or download it again"
        )
    return TensorInfo(name, shape, kind, base + relative, nbytes)


def _refuse_overlaps(path: Path, tensors: dict[str, TensorInfo]) -> None:
    ordered = sorted(tensors.values(), key=lambda t: t.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise Corrupt(f"{path}: tensors {before.name!r} and {after.name!r} overlap at offset {after.offset}")
