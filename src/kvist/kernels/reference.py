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

from kvist.base.dtypes import DType
from kvist.base.errors import KernelError
from kvist.kernels.blockformat import why_not, write_kv
from kvist.kernels.ops import (
    Append,
    AppendLatent,
    Attend,
    AttendExpanded,
    Combine,
    Embed,
    GroupedLinear,
    Linear,
    NormAdd,
    Normalise,
    Op,
    Route,
    Step,
)
from kvist.kernels.reference_attend import attend
from kvist.kernels.reference_latent import (
    append_latent,
    attend_expanded,
    combine,
    grouped_linear,
    route,
    why_no_combine,
    why_no_expanded,
    why_no_grouped,
    why_no_latent,
    why_no_route,
)
from kvist.kernels.reference_parts import ACTIVATIONS, ReferenceWeight, activate, angles, norm, product, rotate, rounded

EPILOGUES = ("store", "add", "glu", "act")


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
        if isinstance(op, GroupedLinear):
            return why_no_grouped(op)
        if isinstance(op, Route):
            return why_no_route(op)
        if isinstance(op, Combine):
            return why_no_combine(op)
        if isinstance(op, Append) and op.store.value_in_key:
            return "keys and values do not fit a store of latent rows: it takes an AppendLatent"
        if isinstance(op, AppendLatent):
            return why_no_latent(op) or why_not(op.store)
        if isinstance(op, AttendExpanded):
            return why_no_expanded(op) or why_not(op.store)
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
        case AppendLatent():
            append_latent(op, step, compute)
        case AttendExpanded():
            attend_expanded(op, step, compute)
        case GroupedLinear():
            grouped_linear(op, step, compute)
        case Route():
            route(op, step, compute)
        case Combine():
            combine(op, step, compute)
        case NormAdd():
            count = len(step.tokens)
            out = op.out[:count]
            out.copy_(out.to(compute) + norm(op.source[:count], op.norm, compute))
        case Normalise():
            count = len(step.tokens)
            op.out[:count].copy_(norm(op.source[:count], op.norm, compute))


def linear(op: Linear, step: Step, compute: torch.dtype) -> None:
    """Execute a Linear on ``step``: see ops.Linear."""
    x = op.source[step.rows.long()] if op.wanted else op.source[: len(step.tokens)]
    x = x.to(compute) if op.norm is None else norm(x, op.norm, compute)
    y = product(rounded(x, op.weight), op.weight)
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
        cos, sin = angles(op.name, op.cos, op.sin, step.positions, compute)
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
