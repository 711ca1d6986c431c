"""Converted vocabularies kept on disk, one file per GGUF header: whole and checksummed, or rebuilt.

A file is a JSON object (tokens and special ids) and the merges as little-endian 32-bit ids, with a digest over both.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from array import array
from pathlib import Path

from xxhash import xxh3_128

from kvist.spec.gguf_file import GgufFile
from kvist.text.vocabulary import Vocabulary, read_vocabulary

_MAGIC = b"kvist vocabulary 1\n"  # another number for another content: older files are then not found, and rebuilt
_DIGEST = 16


def load_vocabulary(gguf: GgufFile, folder: Path | None) -> Vocabulary:
    """The vocabulary of ``gguf``, from ``folder`` when a whole copy is there, else read and kept there.

    A folder that cannot be written costs the next start some time and nothing else. ``folder`` None: no copy is used.
    """
    if folder is None:
        return read_vocabulary(gguf)
    path = folder / f"{_key(gguf)}.vocabulary"
    with contextlib.suppress(OSError):
        found = _decode(path.read_bytes())
        if found is not None:
            return found
    vocabulary = read_vocabulary(gguf)
    with contextlib.suppress(OSError):
        _write(path, _encode(vocabulary))
    return vocabulary


def _key(gguf: GgufFile) -> str:
    """Digest of the whole header: more than the vocabulary is made of, but cheaper to hash than to take apart."""
    with gguf.path.open("rb") as file:
        return xxh3_128(_MAGIC + file.read(gguf.data_offset)).hexdigest()


def _encode(vocabulary: Vocabulary) -> bytes:
    words = json.dumps(
        {"tokens": vocabulary.tokens, "control": vocabulary.control, "user_defined": vocabulary.user_defined},
        ensure_ascii=False,
    ).encode("utf-8", errors="surrogatepass")
    body = len(words).to_bytes(8, "little") + words + _swapped(vocabulary.merges).tobytes()
    return _MAGIC + xxh3_128(body).digest() + body


def _decode(data: bytes) -> Vocabulary | None:
    start = len(_MAGIC) + _DIGEST
    body = data[start:]
    if not data.startswith(_MAGIC) or xxh3_128(body).digest() != data[len(_MAGIC) : start]:
        return None
    end = 8 + int.from_bytes(body[:8], "little")
    words = json.loads(body[8:end].decode("utf-8", errors="surrogatepass"))
    merges = array("i")
    merges.frombytes(body[end:])
    control, user_defined = tuple(words["control"]), tuple(words["user_defined"])
    return Vocabulary(tuple(words["tokens"]), _swapped(merges), control, user_defined)


def _swapped(merges: array[int]) -> array[int]:
    """``merges`` between this machine's byte order and the file's."""
    if sys.byteorder == "little":
        return merges
    merges = merges[:]
    merges.byteswap()
    return merges


def _write(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` in one step: a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
