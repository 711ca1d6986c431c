"""A GGUF model in several files, as llama.cpp splits them: found by their names, read as one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from kvist.base.errors import Corrupt, UsageError
from kvist.spec.gguf_file import GgufFile, TensorInfo, read_gguf

_PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_MOST_PARTS = 4096


def split_parts(path: Path) -> tuple[Path, ...]:
    """Every file of the model that ``path`` is a part of, in order; itself alone when it is whole. UsageError: absent.

    Only names decide here, so it costs nothing.
    """
    match = _PART.match(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= _MOST_PARTS:
        raise UsageError(f"{path.name} says it is part {int(match['number'])} of {count}: 1 to {_MOST_PARTS} can be")
    parts = tuple(path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))
    absent = [part.name for part in parts if not part.is_file()]
    if absent:
        raise UsageError(f"{path.parent}: parts of this model are not there: {', '.join(absent[:4])}")
    return parts


def read_model_file(path: str | Path) -> GgufFile:
    """The header of a GGUF model, whole or split: the metadata of its first part, the tensors of all.

    Raises as ``read_gguf`` does; Corrupt when the parts do not belong together.
    """
    path = Path(path)
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    parts = split_parts(path)
    if count in (0, 1) and len(parts) == 1:
        return first
    if len(parts) != count:
        raise UsageError(
            f"{path}: one of {count!r} parts, but its name says {len(parts)}: keep the names that llama-gguf-split gave"
        )
    tensors: dict[str, TensorInfo] = {}
    files = []
    for number, part in enumerate(parts):
        file = read_gguf(part)
        stated = file.metadata.get("split.no"), file.metadata.get("split.count")
        if stated != (number, count):
            raise Corrupt(f"{part}: says it is part {stated[0]!r} of {stated[1]!r}, expected {number} of {count}")
        twice = sorted(tensors.keys() & file.tensors.keys())
        if twice:
            raise Corrupt(f"{part}: tensor {twice[0]!r} stands in an earlier part too")
        tensors |= {name: replace(info, part=part) for name, info in file.tensors.items()}
        files.append(file)
    total = files[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise Corrupt(f"{path.parent}: the parts hold {len(tensors)} tensors, the first says {total!r}")
    return replace(files[0], size=sum(file.size for file in files), tensors=tensors)
