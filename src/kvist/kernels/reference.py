"""Every operation in plain torch, one after the other: what correct means.

Two modes. ``compute=torch.float32`` is what runs where the native kernels do not: it rounds where the contract says so
(what enters a product, once, to the product's own type). ``compute=torch.float64`` is the judge: it rounds nothing on
the way; only what is *stored* is rounded, by the type of the buffer or of the K/V store that it is written to, so with
float64 buffers and a float32 store the stored K and V carry the only roundings.

Weights are read in row slices, converted to the compute type slice by slice, so no second copy of a matrix is made.
A ``Weight`` of another backend works too, through ``rows``: one operation of a native model can be run here.

Judged by value: torch's matrix product depends on the number of rows in its last bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.base.errors import KernelError
from kvist.kernels.blockformat import why_not, write_kv
from kvist.kernels.ops import (
    Append,
    Attend,
    Embed,
    Linear,
    NormAdd,
    Normalise,
    NormWeight,
    Op,
    Step,
    Weight,
    torch_dtype,
)
from kvist.kernels.reference_attend import attend

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
EPILOGUES = ("store", "add", "glu", "act")
SLICE = 1 << 22  # elements of a weight that are converted at once: 16 MB as float32


class ReferenceWeight:
    """A matrix [N, K] as one torch tensor in its own type; of a glu weight the rows 0..N/2 are the gate."""

    def __init__(self, n: int, k: int, dtype: DType, glu: bool = False) -> None:
        """Allocate an unfilled matrix. Raises KernelError for sizes and types that no product has."""
        if n <= 0 or k <= 0 or (glu and n % 2):
            raise KernelError(f"a {'glu ' if glu else ''}weight of {n} rows of {k} is none: rows come in whole pairs")
        if dtype not in (FLOAT32, BFLOAT16):
            raise KernelError(
                f"weights of type {dtype.name} have no product: convert to float32 or bfloat16 when loading"
            )
        self.n, self.k, self.dtype, self.glu = n, k, dtype, glu
        self.data = torch.empty(n, k, dtype=torch_dtype(dtype))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.data.numel() * self.dtype.bytes

    def fill(self, row: int, rows: Tensor) -> None:
        """Write ``rows`` [n, K] as rows row..row+n, rounded once. Raises KernelError when they do not fit."""
        if rows.dim() != 2 or rows.shape[1] != self.k or row < 0 or row + rows.shape[0] > self.n:
            raise KernelError(f"rows {list(rows.shape)} at row {row} do not fit a weight of {self.n} rows of {self.k}")
        self.data[row : row + rows.shape[0]].copy_(rows)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` as float32 [len(ids), K]."""
        return self.data[ids.long()].to(torch.float32)


@dataclass(slots=True)
class ReferenceExecutor:
    """Operations in order, each executed on its own."""

    ops: tuple[Op, ...]
    compute: torch.dtype = torch.float32

    def run(self, step: Step) -> None:
        """Execute every operation on ``step``."""
        self.run_range(step, 0, len(self.ops))

    def run_range(self, step: Step, first: int, last: int) -> None:
        """Execute operations first..last-1 on ``step``."""
        for op in self.ops[first:last]:
            self.run_one(op, step)

    def run_one(self, op: Op, step: Step) -> None:
        """Execute ``op`` alone on ``step``, reading and writing the buffers that it names."""
        execute(op, step, self.compute)


class ReferenceBackend:
    """The operations in plain torch, in float32 (default) or float64 (the judge)."""

    def __init__(self, compute: torch.dtype = torch.float32) -> None:
        """``compute`` is torch.float32 or torch.float64; anything else is a KernelError."""
        if compute not in (torch.float32, torch.float64):
            raise KernelError(f"the reference computes in float32 or float64, not in {compute}")
        self.compute = compute
        self.name = "reference" if compute == torch.float32 else "reference-float64"

    def refuses(self, op: Op) -> str | None:
        """Why ``op`` is outside its contract; None when it can be executed."""
        if isinstance(op, Linear):
            return _why_no_linear(op)
        if isinstance(op, Append | Attend):
            store = op.store
            if op.num_heads <= 0 or op.num_heads % store.num_kv_heads:
                return f"{op.num_heads} query heads cannot be shared out evenly over {store.num_kv_heads} kv heads"
            return why_not(store)
        return None

    def weight(self, n: int, k: int, dtype: DType, glu: bool = False) -> ReferenceWeight:
        """An unfilled matrix [N, K]."""
        return ReferenceWeight(n, k, dtype, glu)

    def compile(self, ops: list[Op], **settings: Any) -> ReferenceExecutor:
        """An executor of ``ops``. Settings (threads and the like) are torch's own business here and change nothing.

        Raises KernelError that names the first operation which is outside its contract.
        """
        for op in ops:
            reason = self.refuses(op)
            if reason is not None:
                raise KernelError(f"{op.name}: {reason}")
        return ReferenceExecutor(tuple(ops), self.compute)


@torch.no_grad()
def execute(op: Op, step: Step, compute: torch.dtype) -> None:
    """Execute one operation. Buffers may be longer than the step; only its rows are read and written."""
    match op:
        case Embed():
            rows = op.weight.rows(step.tokens).to(compute)
            rows = rows * op.scale
            if op.places is not None:
                rows = rows + op.places.rows(step.positions).to(compute)
            op.out[: len(rows)].copy_(rows)
        case Linear():
            linear(op, step, compute)
        case Append():
            append(op, step, compute)
        case Attend():
            attend(op, step, compute)
        case NormAdd():
            count = len(step.tokens)
            out = op.out[:count]
            out.copy_(out.to(compute) + norm(op.source[:count], op.norm, compute))
        case Normalise():
            count = len(step.tokens)
            op.out[:count].copy_(norm(op.source[:count], op.norm, compute))


def norm(x: Tensor, weight: NormWeight, compute: torch.dtype) -> Tensor:
    """RMS norm, or layer norm when centred, over the last axis, in the compute type: see ops.NormWeight."""
    x = x.to(compute)
    if weight.centred:
        x = x - x.mean(-1, keepdim=True)
    y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + weight.eps) * weight.weight.to(compute)
    return y if weight.bias is None else y + weight.bias.to(compute)


def linear(op: Linear, step: Step, compute: torch.dtype) -> None:
    """Execute a Linear on ``step``: see ops.Linear."""
    x = op.source[step.rows.long()] if op.wanted else op.source[: len(step.tokens)]
    x = x.to(compute) if op.norm is None else norm(x, op.norm, compute)
    if compute == torch.float32:
        x = x.to(torch_dtype(op.weight.dtype)).to(compute)
    y = product(x, op.weight)
    if op.bias is not None:
        y += op.bias.to(compute)
    out = op.out[: len(y)]
    if op.epilogue == "glu":
        gate, up = y.chunk(2, -1)
        out.copy_(activate(gate, op.activation) * up)
    elif op.epilogue == "act":
        out.copy_(activate(y, op.activation))
    elif op.epilogue == "add":
        out.copy_(out.to(compute) + y * op.scale)
    else:
        y = y * op.scale
        out.copy_(y if op.softcap is None else op.softcap * torch.tanh(y / op.softcap))


def activate(x: Tensor, activation: str) -> Tensor:
    """The gate's function: ``silu``, ``gelu_tanh`` or ``gelu``."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def product(x: Tensor, weight: Weight) -> Tensor:
    """Product of x [T, K] and the transposed weight as [T, N] in x's type; the weight is converted slice by slice."""
    y = x.new_empty(len(x), weight.n)
    count = max(1, SLICE // weight.k)
    if isinstance(weight, ReferenceWeight) and weight.data.dtype == x.dtype:
        count = weight.n
    for start in range(0, weight.n, count):
        stop = min(start + count, weight.n)
        if isinstance(weight, ReferenceWeight):
            rows = weight.data[start:stop]
        else:
            rows = weight.rows(torch.arange(start, stop))
        y[:, start:stop] = x @ rows.to(x.dtype).T
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``rotary`` channels of x [T, heads, D] by cos and sin [T, rotary/2], i with i + rotary/2."""
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)


def append(op: Append, step: Step, compute: torch.dtype) -> None:
    """Execute an Append on ``step``: see ops.Append. Raises NotResident when a position has no block."""
    store, count = op.store, len(step.tokens)
    qkv = op.qkv[:count].to(compute)
    k_at = op.num_heads * store.head_dim
    v_at = k_at + store.num_kv_heads * store.head_dim
    q = qkv[:, :k_at].view(count, op.num_heads, store.head_dim)
    k = qkv[:, k_at:v_at].view(count, store.num_kv_heads, store.head_dim)
    v = qkv[:, v_at:].view(count, store.num_kv_heads, store.v_head_dim)
    if op.q_norm is not None:
        q = norm(q, op.q_norm, compute)
    if op.k_norm is not None:
        k = norm(k, op.k_norm, compute)
    if op.cos is not None and op.sin is not None:
        positions = step.positions.long()
        if count and int(positions.max()) >= len(op.cos):
            raise KernelError(
                f"{op.name}: position {int(positions.max())} lies beyond the rotation table of {len(op.cos)} positions"
            )
        cos, sin = op.cos[positions].to(compute), op.sin[positions].to(compute)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    op.q_out[:count].view(count, op.num_heads, store.head_dim).copy_(q * op.scale)
    starts = step.starts.tolist()
    for request, (first, last) in enumerate(pairwise(starts)):
        rows = slice(first, last)
        write_kv(store, step.tables[store.group][request], step.positions[rows], k[rows], v[rows])


def _why_no_linear(op: Linear) -> str | None:
    """Why a Linear is outside its contract; None when it is not."""
    if op.epilogue not in EPILOGUES:
        return f"epilogue {op.epilogue!r} is unknown: use one of {', '.join(EPILOGUES)}"
    if op.epilogue in ("glu", "act") and op.activation not in ACTIVATIONS:
        return f"activation {op.activation!r} is unknown: use one of {', '.join(ACTIVATIONS)}"
    if (op.epilogue == "glu") != op.weight.glu:
        return f"epilogue {op.epilogue!r} does not go with a weight {'with' if op.weight.glu else 'without'} gate rows"
    if op.softcap is not None and op.epilogue != "store":
        return f"a soft cap belongs to logits, not to epilogue {op.epilogue!r}"
    if op.scale != 1.0 and op.epilogue not in ("store", "add"):
        return f"a scale belongs to what is stored or added, not to epilogue {op.epilogue!r}"
    width = op.weight.n // 2 if op.weight.glu else op.weight.n
    if op.source.shape[-1] != op.weight.k or op.out.shape[-1] != width:
        return (
            f"a weight [{op.weight.n}, {op.weight.k}] turns {op.weight.k} channels into {width}, "
            f"not {op.source.shape[-1]} into {op.out.shape[-1]}"
        )
    return None
