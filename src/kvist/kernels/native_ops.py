"""What native kernels accept, and how each operation is handed to them as addresses and sizes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32
from kvist.kernels.blockformat import why_not
from kvist.kernels.ops import (
    SPLIT,
    TILE,
    Append,
    AppendLatent,
    Attend,
    AttendExpanded,
    Combine,
    Embed,
    GroupedLinear,
    LayerStore,
    Linear,
    NormAdd,
    Normalise,
    NormWeight,
    Op,
    Route,
    torch_dtype,
)
from kvist.kernels.reference_latent import why_no_combine, why_no_expanded, why_no_grouped, why_no_latent, why_no_route

if TYPE_CHECKING:
    from types import ModuleType

TYPES = {FLOAT32.name: 0, BFLOAT16.name: 1, FLOAT16.name: 2}
TORCH_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_EPILOGUES = {"store": 0, "add": 1, "glu": 2, "act": 3}
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


def refusal(op: Op) -> str | None:
    """Why these kernels cannot execute ``op``, its weights aside; None when they can."""
    for buffer in _buffers(op):
        if buffer.device.type != "cpu":
            return f"a buffer lies on {buffer.device}: native kernels read the CPU's memory"
        if buffer.dim() == 2 and buffer.stride(1) != 1:
            return "a buffer's rows are not contiguous"
    reason = _of_contract(op) or _buffer_refusal(op)
    if reason is not None:
        return reason
    if isinstance(op, Append | AppendLatent | Attend | AttendExpanded):
        size = op.store.block_size
        if SPLIT % size and size % SPLIT:
            return f"block size {size} neither divides nor is a multiple of {SPLIT}, the keys of one split"
        if size % TILE:
            return f"block size {size} is not a multiple of {TILE}"
        if op.num_heads % op.store.num_kv_heads:
            return f"{op.num_heads} query heads cannot be shared out evenly over {op.store.num_kv_heads} kv heads"
        return _norm_refusal(op) or why_not(op.store)
    return None


def _of_contract(op: Op) -> str | None:
    """Why ``op`` is outside a contract that every backend shares; None when it is not."""
    match op:
        case AppendLatent():
            return why_no_latent(op)
        case AttendExpanded():
            return why_no_expanded(op)
        case GroupedLinear():
            return why_no_grouped(op)
        case Route():
            return why_no_route(op)
        case Combine():
            return why_no_combine(op)
        case Append() if op.store.value_in_key:
            return "keys and values do not fit a store of latent rows: it takes an AppendLatent"
    return None


def _norm_refusal(op: Append | AppendLatent | Attend | AttendExpanded) -> str | None:
    """Why an append's norms are not what the kernels do; None when they are."""
    norms: list[NormWeight | None] = []
    if isinstance(op, Append):
        norms = [op.q_norm, op.k_norm]
    elif isinstance(op, AppendLatent):
        norms = [op.kv_norm]
    known = [norm for norm in norms if norm is not None]
    if any(norm.centred or norm.bias is not None for norm in known):
        return "queries, keys and latents are normalised by rms only"
    if len({norm.eps for norm in known}) > 1:
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
        case Attend() | AttendExpanded():
            return [op.q, op.out, op.store.data]
        case AppendLatent():
            return [op.q, *([] if op.absorbed is None else [op.absorbed]), op.kv, op.q_out, op.store.data]
        case GroupedLinear():
            return [op.source, op.out, *([] if op.ids is None else [op.ids])]
        case Route():
            return [op.scores, op.ids, op.gates]
        case Combine():
            return [op.source, op.gates, op.out]


def _buffer_refusal(op: Op) -> str | None:
    """Why a buffer's type or width is not the contract's: kernels take raw addresses and would read garbage."""
    single = (torch.float32,)
    # A width of -1: the contract has checked it.
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
        case GroupedLinear():
            act = (torch_dtype(op.weights[0].dtype),)
            source = single if op.norm else (*single, *act)
            expected = [
                ("source", op.source, source, -1),
                ("out", op.out, single if op.epilogue == "store" else (*single, *act), -1),
            ]
        case Route():
            expected = [("scores", op.scores, single, -1), ("gates", op.gates, single, op.top_k)]
        case Combine():
            expected = [
                (name, buffer, single, -1)
                for name, buffer in (("source", op.source), ("gates", op.gates), ("out", op.out))
            ]
        case AppendLatent():
            query = (torch.bfloat16,) if op.store.dtype == BFLOAT16 else single
            expected = [
                ("q", op.q, single, -1),
                ("absorbed", op.q if op.absorbed is None else op.absorbed, single, -1),
                ("kv", op.kv, single, op.store.head_dim),
                ("q_out", op.q_out, query, -1),
            ]
        case AttendExpanded():
            query = (torch.bfloat16,) if op.store.dtype == BFLOAT16 else single
            expected = [("q", op.q, query, -1), ("out", op.out, (torch.float32, torch.bfloat16), -1)]
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
        if buffer.dtype not in types or width not in (-1, math.prod(buffer.shape[1:])):
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
        TYPES[store.dtype.name],
        store.group,
        store.value_in_key,
    )


def _embed(native: ModuleType, program: Any, op: Embed) -> None:
    places = None if op.places is None else _handle(op.places)
    program.embed(_handle(op.weight), op.scale, op.out.data_ptr(), op.out.stride(0), places)


def _handle(weight: Any) -> Any:
    """The kernels' own view of a weight of theirs, which ``NativeBackend.refuses`` has made sure that it is."""
    return weight.handle


def _linear(native: ModuleType, program: Any, op: Linear) -> None:
    program.linear(
        _handle(op.weight),
        op.source.data_ptr(),
        op.source.stride(0),
        op.out.data_ptr(),
        op.out.stride(0),
        TORCH_TYPES[op.source.dtype],
        TORCH_TYPES[op.out.dtype],
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
        TORCH_TYPES[op.out.dtype],
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


def _append_latent(native: ModuleType, program: Any, op: AppendLatent) -> None:
    rope = op.store.head_dim - op.store.v_head_dim
    program.append_latent(
        _store(native, op.store),
        op.q.data_ptr(),
        op.q.stride(0),
        op.q.shape[-1] // op.num_heads - rope,
        _pointer(op.absorbed),
        0 if op.absorbed is None else op.absorbed.stride(0),
        op.kv.data_ptr(),
        op.kv.stride(0),
        op.q_out.data_ptr(),
        op.q_out.stride(0),
        op.num_heads,
        op.scale,
        _pointer(op.cos),
        _pointer(op.sin),
        0 if op.cos is None else len(op.cos),
        _pointer(op.kv_norm.weight) if op.kv_norm else 0,
        op.kv_norm.eps if op.kv_norm else 0.0,
    )


def _attend_expanded(native: ModuleType, program: Any, op: AttendExpanded) -> None:
    program.attend_expanded(
        _store(native, op.store),
        op.q.data_ptr(),
        op.q.stride(0),
        op.out.data_ptr(),
        op.out.stride(0),
        TORCH_TYPES[op.out.dtype],
        op.num_heads,
        [_handle(weight) for weight in op.keys],
        [_handle(weight) for weight in op.values],
    )


def _grouped(native: ModuleType, program: Any, op: GroupedLinear) -> None:
    program.grouped(
        [_handle(weight) for weight in op.weights],
        op.source.data_ptr(),
        op.source.stride(0),
        op.source_stride,
        op.out.data_ptr(),
        op.out.stride(0),
        op.slots,
        _pointer(op.ids),
        0 if op.ids is None else op.ids.stride(0),
        TORCH_TYPES[op.source.dtype],
        TORCH_TYPES[op.out.dtype],
        _EPILOGUES[op.epilogue],
        _ACTIVATIONS[op.activation],
        _pointer(op.norm.weight) if op.norm else 0,
        op.norm.eps if op.norm else 0.0,
        _pointer(op.norm.bias) if op.norm else 0,
        op.norm is not None and op.norm.centred,
        op.scale,
    )


def _route(native: ModuleType, program: Any, op: Route) -> None:
    program.route(
        op.scores.data_ptr(),
        op.scores.stride(0),
        op.scores.shape[-1],
        op.ids.data_ptr(),
        op.ids.stride(0),
        op.gates.data_ptr(),
        op.gates.stride(0),
        op.top_k,
        op.scoring == "sigmoid",
        op.groups,
        op.top_groups,
        op.group_score == "top2",
        _pointer(op.bias),
        op.normalise,
        op.scale,
    )


def _combine(native: ModuleType, program: Any, op: Combine) -> None:
    program.combine(
        op.source.data_ptr(),
        op.source.stride(0),
        op.gates.data_ptr(),
        op.gates.stride(0),
        op.out.data_ptr(),
        op.out.stride(0),
        op.out.shape[-1],
        op.gates.shape[-1],
    )


ADD: dict[type, Any] = {
    Embed: _embed,
    Linear: _linear,
    Append: _append,
    Attend: _attend,
    AppendLatent: _append_latent,
    AttendExpanded: _attend_expanded,
    GroupedLinear: _grouped,
    Route: _route,
    Combine: _combine,
    NormAdd: _norm_add,
    Normalise: _norm_add,
}
