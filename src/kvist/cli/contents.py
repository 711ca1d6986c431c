"""``kvist info FILE``: what a GGUF file holds, what it takes in memory packed and unpacked, and what fits here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvist.base.errors import KvistError, UsageError
from kvist.base.machine import available_memory
from kvist.cli.summary import size
from kvist.spec.gguf_file import GgufFile, read_gguf

FORMS = ("packed", "bfloat16", "float32")


@dataclass(slots=True)
class Row:
    """Tensors of one type: how many, their elements, and bytes in the file and in memory."""

    kind: str
    tensors: int = 0
    elements: int = 0
    file_bytes: int = 0
    packed_bytes: int = 0
    bfloat16_bytes: int = 0
    float32_bytes: int = 0
    stays_packed: bool = False


def contents(model: str) -> dict[str, Any]:
    """The facts of one file, as plain values. UsageError for a model that is no GGUF file."""
    from kvist.spec.source import resolve

    source = resolve(model)
    if source.kind != "gguf":
        raise UsageError(f"{model} is no GGUF file: its tensors are not packed; kvist plan {model} says what it takes")
    file = read_gguf(source.path)
    rows = by_type(file)
    total = {form: sum(getattr(row, f"{form}_bytes") for row in rows) for form in FORMS}
    free = available_memory()
    per_token, most = _cache_facts(file)
    fits = {
        form: {
            "bytes": nbytes,
            "fits": free is None or nbytes <= free,
            "context": min(most, (free - nbytes) // per_token)
            if free is not None and per_token and nbytes <= free
            else None,
        }
        for form, nbytes in total.items()
    }
    return {
        "file": str(source.path),
        "architecture": file.metadata.get("general.architecture"),
        "file_bytes": file.size,
        "types": [
            {
                "type": row.kind,
                "tensors": row.tensors,
                "elements": row.elements,
                "file_bytes": row.file_bytes,
                "packed_bytes": row.packed_bytes,
                "bfloat16_bytes": row.bfloat16_bytes,
                "stays_packed": row.stays_packed,
            }
            for row in rows
        ],
        "available_bytes": free,
        "cache_bytes_per_token": per_token,
        "weights": fits,
    }


def by_type(file: GgufFile) -> list[Row]:
    """Tensors by type, the largest first. Vectors become float32 whatever happens to matrices."""
    from kvist.kernels.packed import packed_bytes, packed_refusal

    rows: dict[str, Row] = {}
    for info in file.tensors.values():
        row = rows.setdefault(info.kind.name, Row(info.kind.name))
        columns = info.shape[-1]
        elements = info.nbytes // info.row_nbytes * columns
        matrix = len(info.shape) > 1
        plain = elements * (2 if matrix else 4)
        packed = matrix and packed_refusal(info.kind.name, columns) is None
        row.tensors += 1
        row.elements += elements
        row.file_bytes += info.nbytes
        row.packed_bytes += packed_bytes(info.kind.name, elements // columns, columns) if packed else plain
        row.bfloat16_bytes += plain
        row.float32_bytes += 4 * elements
        row.stays_packed |= packed
    return sorted(rows.values(), key=lambda row: -row.file_bytes)


def lines(found: dict[str, Any]) -> list[str]:
    """The facts for people."""
    out = [f"file      {found['file']}, {size(found['file_bytes'])}, architecture {found['architecture']}", ""]
    out.append(f"{'type':<10}{'tensors':>8}{'elements':>16}{'in the file':>14}{'packed':>12}{'bfloat16':>12}")
    for row in found["types"]:
        kept = size(row["packed_bytes"])
        note = "" if row["stays_packed"] else "  " + _note(row["type"])
        out.append(
            f"{row['type']:<10}{row['tensors']:>8}{row['elements']:>16,}{size(row['file_bytes']):>14}"
            f"{kept:>12}{size(row['bfloat16_bytes']):>12}{note}"
        )
    free = found["available_bytes"]
    out += ["", f"weights   {'memory unknown' if free is None else f'{size(free)} of memory available'}"]
    for form, fact in found["weights"].items():
        verdict = "fits" if fact["fits"] else "does not fit"
        context = f", with a bfloat16 cache of {fact['context']:,} tokens" if fact["context"] else ""
        out.append(f"          --weights {form:<10}{size(fact['bytes']):>12}  {verdict}{context}")
    return out


def _note(kind: str) -> str:
    return "as it is" if kind in ("f32", "f16", "bf16") else "unpacked when loaded: no kernel takes this type packed"


def _cache_facts(file: GgufFile) -> tuple[int | None, int]:
    """Bytes of bfloat16 cache for a token, and the most positions; None and 0 for an architecture that cannot run."""
    from kvist.base.dtypes import BFLOAT16
    from kvist.cache.layout import groups_of
    from kvist.cache.sizing import BLOCK_SIZE, bytes_per_token
    from kvist.spec.from_gguf import gguf_model

    try:
        spec = gguf_model(file).spec
        return bytes_per_token(groups_of(spec, BFLOAT16, BLOCK_SIZE)), spec.max_position
    except KvistError:
        return None, 0
