"""The native backend: operations handed to ``csrc/`` as raw addresses, a whole list of them in one call.

The variant (instruction set) is chosen at run time, best first; ``KVIST_KERNELS`` forces one by name, or ``reference``
for none. Every variant keeps the laws; between variants the last bits differ, and so does their fingerprint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.base.errors import KernelError
from kvist.base.machine import MOST_THREADS
from kvist.kernels.native_ops import ADD, TORCH_TYPES, TYPES, refusal
from kvist.kernels.ops import AttendExpanded, Embed, GroupedLinear, Linear, Op, Step
from kvist.kernels.packed import PackedWeight

if TYPE_CHECKING:
    from types import ModuleType

PANEL = 32  # output columns of one packed panel


def load() -> ModuleType:
    """The extension module. ImportError when it was not built (torch is imported first: one libgomp serves both)."""
    from importlib import import_module

    return import_module("kvist._native")


def variants() -> list[str]:
    """Kernel variants that this machine can run, best first; empty when the native part is not built."""
    try:
        return list(load().variants())
    except ImportError:
        return []


class NativeWeight:
    """A matrix [N, K] in panels of 32 output columns: ``[N/32][K/2][32][2]`` bfloat16 or ``[N/32][K][32]`` float32.

    A glu weight's panel holds 16 gate columns, then the up columns of the same 16 outputs.
    """

    def __init__(self, backend: NativeBackend, n: int, k: int, dtype: DType, glu: bool) -> None:
        """Allocate zeroed panels. KernelError for what the kernels do not take."""
        reason = weight_refusal(n, k, dtype, glu)
        if reason:
            raise KernelError(reason)
        self.n, self.k, self.dtype, self.glu = n, k, dtype, glu
        self._backend = backend
        panels = -(-n // 2 // 16) if glu else -(-n // PANEL)
        size = panels * PANEL * k * dtype.bytes
        # The system hands out zeroed pages when they are first written, so nothing is cleared twice; aligned to a cache
        # line by hand.
        raw = torch.from_numpy(np.zeros(size + 64, dtype=np.uint8))
        skip = -raw.data_ptr() % 64
        self.data = raw[skip : skip + size]
        self.handle = backend.native.Weight(self.data.data_ptr(), n, k, TYPES[dtype.name], glu)

    @property
    def nbytes(self) -> int:
        """Bytes held, padding of the last panel included."""
        return self.data.numel()

    def fill(self, row: int, rows: Tensor) -> None:
        """Write float32 or bfloat16 ``rows`` [n, K] as rows row..row+n, rounded once (KernelError: no fit)."""
        if rows.dim() != 2 or rows.shape[1] != self.k or row < 0 or row + rows.shape[0] > self.n:
            raise KernelError(f"rows {list(rows.shape)} at row {row} do not fit a weight of {self.n} rows of {self.k}")
        if rows.dtype not in (torch.float32, torch.bfloat16):
            rows = rows.float()
        rows = rows.contiguous()
        self._pack(rows.data_ptr(), TORCH_TYPES[rows.dtype], -1, len(rows), row, 0)

    def fill_gguf(self, address: int, ggml_type: int, count: int, row_map: Tensor) -> None:
        """Unpack ``count`` rows of GGUF blocks at ``address``; row i becomes row ``row_map[i]`` (int64)."""
        if (
            row_map.dtype != torch.int64
            or len(row_map) != count
            or (count and not 0 <= int(row_map.min()) <= int(row_map.max()) < self.n)
        ):
            raise KernelError(f"row map {list(row_map.shape)} does not place {count} rows in a weight of {self.n}")
        self._pack(address, 0, ggml_type, count, 0, row_map.data_ptr())

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` as float32 [len(ids), K]."""
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty(len(ids), self.k)
        self._backend.native.unpack(self._backend.variant, self.handle, ids.data_ptr(), len(ids), out.data_ptr())
        return out

    def _pack(self, address: int, kind: int, gguf: int, count: int, first: int, row_map: int) -> None:
        backend = self._backend
        backend.native.pack(backend.variant, self.handle, address, kind, gguf, count, first, row_map, backend.threads)


def weight_refusal(n: int, k: int, dtype: DType, glu: bool) -> str | None:
    """Why the native kernels hold no such weight; None when they do."""
    if n < 1 or k < 1 or (glu and n % 2):
        return f"a {'glu ' if glu else ''}weight of {n} rows of {k} is none: rows come in whole pairs"
    if dtype not in (FLOAT32, BFLOAT16):
        return f"weights of type {dtype.name} have no native product: convert to float32 or bfloat16 when loading"
    if dtype == BFLOAT16 and k % 2:
        return f"rows of {k} bfloat16 elements: the dot products take pairs, so the width must be even"
    return None


class NativeExecutor:
    """A compiled list of operations. ``run`` executes all; ``run_range`` some, for those who look in between."""

    def __init__(self, backend: NativeBackend, ops: list[Op]) -> None:
        """Hand every operation over; tensors that they name are kept alive here."""
        self.ops = tuple(ops)
        self._program = backend.native.Program(backend.variant, backend.threads)
        for op in ops:
            ADD[type(op)](backend.native, self._program, op)

    def run(self, step: Step) -> None:
        """Execute every operation on ``step``. KernelError when an index of the step leads nowhere."""
        self.run_range(step, 0, len(self.ops))

    def run_range(self, step: Step, first: int, last: int) -> None:
        """Execute operations first..last-1 on ``step``."""
        tables = [(table.data_ptr(), table.shape[1]) for table in step.tables]
        try:
            self._program.run(
                step.tokens.data_ptr(),
                step.positions.data_ptr(),
                step.starts.data_ptr(),
                len(step.tokens),
                len(step.starts) - 1,
                tables,
                step.rows.data_ptr(),
                len(step.rows),
                first,
                last,
            )
        except (IndexError, ValueError) as error:
            raise KernelError(f"the step does not fit its buffers: {error}") from error


class NativeBackend:
    """Kernels of one instruction set, run by ``threads`` threads (which never reach the result)."""

    def __init__(self, variant: str | None = None, threads: int | None = None) -> None:
        """``variant``: one of ``variants()``, default the best; ``threads``: default all processors of the process."""
        self.native = load()
        known = list(self.native.variants())
        self.variant = known[0] if variant is None else variant
        if self.variant not in known:
            raise KernelError(f"no kernel variant {variant!r} on this machine: there are {', '.join(known)}")
        self.threads = self.native.max_threads() if threads is None else threads
        if not 1 <= self.threads <= MOST_THREADS:
            raise KernelError(f"{self.threads} threads: use 1 to {MOST_THREADS}")
        self.name = f"native-{self.variant}"

    def refuses(self, op: Op) -> str | None:
        """Why these kernels cannot execute ``op``; None when they can."""
        if isinstance(op, Embed | Linear) and not isinstance(op.weight, NativeWeight | PackedWeight):
            return "the weight is not packed for native kernels"
        if isinstance(op, Embed) and not (op.places is None or isinstance(op.places, NativeWeight)):
            return "the learned positions are not packed for native kernels"
        grouped = op.weights if isinstance(op, GroupedLinear) else ()
        if isinstance(op, AttendExpanded):
            grouped = (*op.keys, *op.values)
        if not all(isinstance(weight, NativeWeight) for weight in grouped):
            return "grouped weights are not float32 or bfloat16 panels of native kernels"
        return refusal(op)

    def weight(self, n: int, k: int, dtype: DType, glu: bool = False) -> NativeWeight:
        """Zeroed panels for a matrix [N, K]."""
        return NativeWeight(self, n, k, dtype, glu)

    def packed(self, parts: Sequence[tuple[int, str]], k: int, glu: bool = False) -> PackedWeight:
        """A zeroed matrix whose segments (rows, GGUF type) stay packed."""
        return PackedWeight(self, parts, k, glu)

    def compile(self, ops: list[Op], **settings: Any) -> NativeExecutor:
        """An executor of ``ops``. KernelError that names the first operation which is refused."""
        for op in ops:
            reason = self.refuses(op)
            if reason is not None:
                raise KernelError(f"{op.name}: {reason}")
        return NativeExecutor(self, ops)
