"""The native backend: operations handed to ``csrc/`` as raw addresses, a whole list of them in one call.

The variant (instruction set) is chosen at run time, best first; ``KVIST_KERNELS`` forces one by name, or ``reference``
for none. Every variant keeps the laws; between variants the last bits differ, and so does their fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from kvist.base.errors import KernelError
from kvist.kernels.blockformat import why_not
from kvist.kernels.ops import (
    SPLIT,
    TILE,
    Append,
    AppendLatent,
    Attend,
    Combine,
    Embed,
    GroupedLinear,
    LayerStore,
    Linear,
    NormAdd,
    Normalise,
    Op,
    Route,
    Step,
    torch_dtype,
)
from kvist.kernels.packed import PackedWeight

if TYPE_CHECKING:
    from types import ModuleType

_TYPES = {FLOAT32.name: 0, BFLOAT16.name: 1, FLOAT16.name: 2}
_TORCH_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_EPILOGUES = {"store": 0, "add": 1, "glu": 2, "act": 3}
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
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
        self.handle = backend.native.Weight(self.data.data_ptr(), n, k, _TYPES[dtype.name], glu)

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
        self._pack(rows.data_ptr(), _TORCH_TYPES[rows.dtype], -1, len(rows), row, 0)

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
            _ADD[type(op)](backend.native, self._program, op)

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
        if not 1 <= self.threads <= 1024:
            raise KernelError(f"{self.threads} threads: use 1 to 1024")
        self.name = f"native-{self.variant}"

    def refuses(self, op: Op) -> str | None:
        """Why these kernels cannot execute ``op``; None when they can."""
        if isinstance(op, AppendLatent | GroupedLinear | Route | Combine):
            return "latent rows and routed experts run on the reference only"
        for buffer in _buffers(op):
            if buffer.device.type != "cpu":
                return f"a buffer lies on {buffer.device}: native kernels read the CPU's memory"
            if buffer.dim() == 2 and buffer.stride(1) != 1:
                return "a buffer's rows are not contiguous"
        if isinstance(op, Embed | Linear) and not isinstance(op.weight, NativeWeight | PackedWeight):
            return "the weight is not packed for native kernels"
        if isinstance(op, Embed) and not (op.places is None or isinstance(op.places, NativeWeight)):
            return "the learned positions are not packed for native kernels"
        reason = _buffer_refusal(op)
        if reason is not None:
            return reason
        if isinstance(op, Append | Attend):
            size = op.store.block_size
            if SPLIT % size and size % SPLIT:
                return f"block size {size} neither divides nor is a multiple of {SPLIT}, the keys of one split"
            if size % TILE:
                return f"block size {size} is not a multiple of {TILE}"
            if op.num_heads % op.store.num_kv_heads:
                return f"{op.num_heads} query heads cannot be shared out evenly over {op.store.num_kv_heads} kv heads"
            return _append_refusal(op) or why_not(op.store)
        return None

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


def _append_refusal(op: Append | Attend) -> str | None:
    """Why an append's norms are not what the kernels do; None when they are."""
    norms = [norm for norm in (op.q_norm, op.k_norm) if norm is not None] if isinstance(op, Append) else []
    if any(norm.centred or norm.bias is not None for norm in norms):
        return "queries and keys are normalised by rms only"
    if len({norm.eps for norm in norms}) > 1:
        return "the norms of queries and keys have one eps"
    return None


def _buffers(op: Op) -> list[Tensor]:
    match op:
        case Embed():
            return [op.out]
        case Linear() | NormAdd() | Normalise():
            return [op.source, op.out]
        case Append():
            return [op.qkv, op.q_out, op.store.data]
        case Attend():
            return [op.q, op.out, op.store.data]
        case _:
            return []


def _buffer_refusal(op: Op) -> str | None:
    """Why a buffer's type or width is not the contract's: kernels take raw addresses and would read garbage."""
    single = (torch.float32,)
    expected: list[tuple[str, Tensor, tuple[torch.dtype, ...], int]] = []
    match op:
        case Embed():
            expected = [("out", op.out, single, op.weight.k)]
        case Linear():
            act = (torch_dtype(op.weight.dtype),)
            rounded = op.epilogue in ("glu", "act")
            expected = [
                ("source", op.source, single if op.norm else (*single, *act), op.weight.k),
                (
                    "out",
                    op.out,
                    (*single, *act) if rounded else single,
                    op.weight.n // 2 if op.epilogue == "glu" else op.weight.n,
                ),
            ]
        case NormAdd() | Normalise():
            width = op.norm.weight.shape[0]
            expected = [("source", op.source, single, width), ("out", op.out, single, width)]
        case Append() | Attend():
            store = op.store
            query = (torch.bfloat16,) if store.dtype == BFLOAT16 else single
            heads = op.num_heads * store.head_dim
            if isinstance(op, Append):
                width = heads + store.num_kv_heads * (store.head_dim + store.v_head_dim)
                expected = [("qkv", op.qkv, single, width), ("q_out", op.q_out, query, heads)]
            else:
                out = (torch.float32, torch.bfloat16)
                expected = [("q", op.q, query, heads), ("out", op.out, out, op.num_heads * store.v_head_dim)]
    for name, buffer, types, width in expected:
        if buffer.dtype not in types or math.prod(buffer.shape[1:]) != width:
            wanted = " or ".join(str(t) for t in types)
            return f"{name} is {buffer.dtype} {list(buffer.shape)}, not {wanted} of {width} channels"
    return None


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _store(native: ModuleType, store: LayerStore) -> Any:
    data = store.data
    return native.Store(
        data.data_ptr(),
        data.shape[0],
        data.stride(0),
        store.block_size,
        store.num_kv_heads,
        store.head_dim,
        store.v_head_dim,
        _TYPES[store.dtype.name],
        store.group,
    )


def _embed(native: ModuleType, program: Any, op: Embed) -> None:
    places = None if op.places is None else _handle(op.places)
    program.embed(_handle(op.weight), op.scale, op.out.data_ptr(), op.out.stride(0), places)


def _handle(weight: Any) -> Any:
    assert isinstance(weight, NativeWeight | PackedWeight)
    return weight.handle


def _linear(native: ModuleType, program: Any, op: Linear) -> None:
    program.linear(
        _handle(op.weight),
        op.source.data_ptr(),
        op.source.stride(0),
        op.out.data_ptr(),
        op.out.stride(0),
        _TORCH_TYPES[op.source.dtype],
        _TORCH_TYPES[op.out.dtype],
        _EPILOGUES[op.epilogue],
        _ACTIVATIONS[op.activation],
        _pointer(op.norm.weight) if op.norm else 0,
        op.norm.eps if op.norm else 0.0,
        _pointer(op.norm.bias) if op.norm else 0,
        op.norm is not None and op.norm.centred,
        _pointer(op.bias),
        op.wanted,
        op.scale,
        op.softcap or 0.0,
    )


def _append(native: ModuleType, program: Any, op: Append) -> None:
    norm = op.q_norm or op.k_norm
    program.append(
        _store(native, op.store),
        op.qkv.data_ptr(),
        op.qkv.stride(0),
        op.q_out.data_ptr(),
        op.q_out.stride(0),
        op.num_heads,
        op.scale,
        0 if op.cos is None else 2 * op.cos.shape[1],
        _pointer(op.cos),
        _pointer(op.sin),
        0 if op.cos is None else len(op.cos),
        _pointer(op.q_norm.weight) if op.q_norm else 0,
        _pointer(op.k_norm.weight) if op.k_norm else 0,
        norm.eps if norm else 0.0,
    )


def _attend(native: ModuleType, program: Any, op: Attend) -> None:
    program.attend(
        _store(native, op.store),
        op.q.data_ptr(),
        op.q.stride(0),
        op.out.data_ptr(),
        op.out.stride(0),
        _TORCH_TYPES[op.out.dtype],
        op.num_heads,
        op.window or 0,
        op.sinks,
        op.softcap or 0.0,
    )


def _norm_add(native: ModuleType, program: Any, op: NormAdd | Normalise) -> None:
    program.norm_add(
        op.source.data_ptr(),
        op.source.stride(0),
        op.out.data_ptr(),
        op.out.stride(0),
        op.out.shape[1],
        op.norm.weight.data_ptr(),
        op.norm.eps,
        _pointer(op.norm.bias),
        op.norm.centred,
        isinstance(op, NormAdd),
    )


_ADD: dict[type, Any] = {
    Embed: _embed,
    Linear: _linear,
    Append: _append,
    Attend: _attend,
    NormAdd: _norm_add,
    Normalise: _norm_add,
}
