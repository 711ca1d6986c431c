"""Weights that stay as GGUF packed them: the file's own bits in strips of 16 rows, unpacked in registers.

What enters a product with them is rounded to 15 bits a block of 32 columns, with one scale from that block of its own
row; the products of a block are summed exactly, as integers, and blocks are added in order in float32. ``dtype`` is
therefore float32: the type in which activations come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvist.base.dtypes import FLOAT32, DType
from kvist.base.errors import KernelError
from kvist.spec.gguf_types import BY_NAME, IDS

if TYPE_CHECKING:
    from kvist.kernels.native import NativeBackend

PACKED_TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")

# Bytes of a block where a half-precision factor stands.
FACTORS: dict[str, tuple[int, ...]] = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
}
_LANES, _BLOCK, _LINE = 16, 32, 64


def strip_bytes(kind: str, k: int) -> int:
    """Bytes of 16 packed rows of ``k`` columns. KernelError for a type or width that is not held packed."""
    reason = packed_refusal(kind, k)
    if reason:
        raise KernelError(reason)
    stored = BY_NAME[kind]
    # A super-block's eight pairs of 6-bit factors take 12 bytes in the file and 16 here.
    block = stored.nbytes + (4 if kind in ("q4_k", "q5_k") else 0)
    return -(-_LANES * (k // stored.elements) * block // _LINE) * _LINE


def packed_bytes(kind: str, rows: int, k: int) -> int:
    """Bytes that ``rows`` rows of ``k`` columns take packed, the last strip's padding included."""
    return -(-rows // _LANES) * strip_bytes(kind, k)


def packed_refusal(kind: str, k: int) -> str | None:
    """Why rows of ``k`` columns of GGUF type ``kind`` are not held packed; None when they are."""
    if kind not in PACKED_TYPES:
        return f"tensors of type {kind} are not held packed: only {', '.join(PACKED_TYPES)} are"
    elements = BY_NAME[kind].elements
    if k < 1 or k % elements:
        return f"rows of {k} columns are no whole number of {kind} blocks of {elements}"
    return None


class PackedWeight:
    """A matrix [N, K] of segments one below the other, each of rows of one GGUF type. A glu weight has two halves."""

    dtype: DType = FLOAT32

    def __init__(self, backend: NativeBackend, parts: Sequence[tuple[int, str]], k: int, glu: bool) -> None:
        """``parts``: (rows, type) of each segment; zeroed. KernelError for what the kernels do not take."""
        if glu and len(parts) == 1 and parts[0][0] % 2 == 0:
            parts = [(parts[0][0] // 2, parts[0][1])] * 2
        counts = [rows for rows, _ in parts]
        if min(counts, default=0) < 1 or (glu and counts != counts[:1] * 2):
            raise KernelError(f"segments of {counts} rows make no {'glu ' if glu else ''}weight")
        self.parts, self.k, self.glu = tuple(parts), k, glu
        self.n = sum(rows for rows, _ in parts)
        self._backend = backend
        self.data = tuple(_zeros(packed_bytes(kind, rows, k)) for rows, kind in parts)
        segments = [(data.data_ptr(), rows, IDS[kind]) for data, (rows, kind) in zip(self.data, parts, strict=True)]
        self.handle = backend.native.packed(segments, k, glu)

    @property
    def nbytes(self) -> int:
        """Bytes held, padding of the last strips included."""
        return sum(data.numel() for data in self.data)

    def fill(self, row: int, rows: Tensor) -> None:
        """Refused: rounding floats to a packed type is a quantiser's work. KernelError."""
        raise KernelError("a packed weight takes the blocks of a GGUF file as they are (fill_gguf), not float rows")

    def fill_gguf(self, address: int, ggml_type: int, count: int, row_map: Tensor) -> None:
        """Take ``count`` rows of GGUF blocks at ``address``; row i becomes row ``row_map[i]`` (int64)."""
        first = 0
        spans = []
        for rows, kind in self.parts:
            if IDS[kind] == ggml_type:
                spans.append((first, first + rows))
            first += rows
        fits = row_map.dtype == torch.int64 and len(row_map) == count
        if fits and count:
            inside = torch.zeros(count, dtype=torch.bool)
            for start, stop in spans:
                inside |= (row_map >= start) & (row_map < stop)
            fits = bool(inside.all())
        if not fits:
            raise KernelError(
                f"row map {list(row_map.shape)} does not place {count} rows of GGUF type {ggml_type} in segments "
                + ", ".join(f"{rows} x {kind}" for rows, kind in self.parts)
            )
        backend = self._backend
        backend.native.pack(
            backend.variant, self.handle, address, 0, ggml_type, count, 0, row_map.data_ptr(), backend.threads
        )

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` as float32 [len(ids), K], value for value what the ``gguf`` package gives."""
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty(len(ids), self.k)
        self._backend.native.unpack(self._backend.variant, self.handle, ids.data_ptr(), len(ids), out.data_ptr())
        return out


def _zeros(nbytes: int) -> Tensor:
    """Zeroed bytes at a cache line; the system hands out pages when they are first written."""
    raw = torch.from_numpy(np.zeros(nbytes + _LINE, dtype=np.uint8))
    skip = -raw.data_ptr() % _LINE
    return raw[skip : skip + nbytes]
