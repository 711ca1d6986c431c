"""Latent rows and routed experts in plain torch: what AppendLatent, GroupedLinear, Route and Combine must do.

The two modes of ``reference`` hold here too: float32 rounds where the contract says so, float64 rounds only what is
stored. Attention over latent rows is ``reference_attend`` itself: only where a value is read differs.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kvist.base.errors import KernelError
from kvist.kernels.blockformat import read_k, write_kv
from kvist.kernels.ops import TILE, AppendLatent, AttendExpanded, Combine, GroupedLinear, Route, Step
from kvist.kernels.reference_parts import ACTIVATIONS, activate, angles, norm, product, rotate, rounded


def append_latent(op: AppendLatent, step: Step, compute: torch.dtype) -> None:
    """Execute an AppendLatent on ``step``: see ops.AppendLatent. Raises NotResident when a position has no block."""
    store, count, heads = op.store, len(step.tokens), op.num_heads
    rank, rope = store.v_head_dim, store.head_dim - store.v_head_dim
    kv = op.kv[:count].to(compute)
    latent, k_rope = kv[:, :rank], kv[:, None, rank:]
    if op.kv_norm is not None:
        latent = norm(latent, op.kv_norm, compute)
    q = op.q[:count].to(compute).view(count, heads, op.q.shape[1] // heads)
    q_rope = q[..., q.shape[-1] - rope :]
    if op.cos is not None and op.sin is not None:
        cos, sin = angles(op.name, op.cos, op.sin, step.positions, compute)
        q_rope, k_rope = rotate(q_rope, cos, sin), rotate(k_rope, cos, sin)
    kept = q[..., : q.shape[-1] - rope]
    if op.absorbed is not None:
        kept = op.absorbed[:count].to(compute).view(count, heads, rank)
    query = torch.cat((kept, q_rope), -1)
    op.q_out[:count].view(count, heads, query.shape[-1]).copy_(query * op.scale)
    rows = torch.cat((latent[:, None], k_rope), -1)
    for request, (first, last) in enumerate(pairwise(step.starts.tolist())):
        write_kv(store, step.tables[store.group][request], step.positions[first:last], rows[first:last], None)


def attend_expanded(op: AttendExpanded, step: Step, compute: torch.dtype) -> None:
    """Execute an AttendExpanded on ``step``: see ops.AttendExpanded. One softmax over all keys: judged by value."""
    store, rank = op.store, op.store.v_head_dim
    everything = torch.arange(op.keys[0].n), torch.arange(op.values[0].n)
    for request, (first, last) in enumerate(pairwise(step.starts.tolist())):
        if first == last:
            continue
        positions = step.positions[first:last].long()
        end = int(positions.max()) + 1
        rows = read_k(store, step.tables[store.group][request], 0, end)[:, 0].to(compute)
        q = op.q[first:last].to(compute).view(last - first, op.num_heads, -1)
        unseen = torch.arange(end)[None, :] > positions[:, None]
        out = op.out[first:last].view(last - first, op.num_heads, -1)
        for head in range(op.num_heads):
            k, v = (
                rounded(rows[:, :rank] @ weight.rows(ids).to(compute).T, weight)
                for weight, ids in zip((op.keys[head], op.values[head]), everything, strict=True)
            )
            scores = q[:, head] @ torch.cat((k, rows[:, rank:]), -1).T
            out[:, head].copy_(torch.softmax(scores.masked_fill(unseen, -torch.inf), -1) @ v)


def grouped_linear(op: GroupedLinear, step: Step, compute: torch.dtype) -> None:
    """Execute a GroupedLinear on ``step``: see ops.GroupedLinear. Raises KernelError for an id without a weight."""
    count, k = len(step.tokens), op.weights[0].k
    if count == 0:
        return
    source = op.source[:count].flatten(1).to(compute)
    if op.norm is not None:
        source = norm(source[:, :k], op.norm, compute)
    out = op.out[:count].view(count, op.slots, -1)
    for slot in range(op.slots):
        x = source[:, slot * op.source_stride :][:, :k]
        if op.ids is None:
            out[:, slot].copy_(_finish(op, product(rounded(x, op.weights[slot]), op.weights[slot])))
            continue
        ids = op.ids[:count, slot].long()
        for index in sorted(set(ids.tolist())):
            if not 0 <= index < len(op.weights):
                raise KernelError(f"{op.name}: weight {index} does not exist: there are {len(op.weights)}")
            rows = torch.nonzero(ids == index)[:, 0]
            weight = op.weights[index]
            out[rows, slot] = _finish(op, product(rounded(x[rows], weight), weight)).to(out.dtype)


def _finish(op: GroupedLinear, y: Tensor) -> Tensor:
    """The epilogue of one product [n, N]."""
    if op.epilogue == "glu":
        gate, up = y.chunk(2, -1)
        return activate(gate, op.activation) * up
    return activate(y, op.activation) if op.epilogue == "act" else y * op.scale


def route(op: Route, step: Step, compute: torch.dtype) -> None:
    """Execute a Route on ``step``: see ops.Route. Selection is by a stable sort: ties go to the lower index."""
    count = len(step.tokens)
    if count == 0:
        return
    logits = op.scores[:count].to(compute)
    scores = torch.softmax(logits, -1) if op.scoring == "softmax" else torch.sigmoid(logits)
    choice = scores if op.bias is None else scores + op.bias.to(compute)
    choice = torch.where(choice.isnan(), -torch.inf, choice)
    if op.groups > 1:
        grouped = choice.view(count, op.groups, -1)
        best = grouped.sort(-1, descending=True).values
        group_scores = best[..., 0] if op.group_score == "max" else best[..., 0] + best[..., 1]
        eligible = torch.zeros(count, op.groups, dtype=torch.bool)
        eligible.scatter_(1, _best(group_scores, op.top_groups), True)
        # Marked by rank, not by value: an expert of another group ranks behind even a NaN of an eligible one.
        chosen = torch.where(eligible.repeat_interleave(grouped.shape[-1], -1), choice.clamp(min=_LOWEST), -torch.inf)
    else:
        chosen = choice
    ids = _best(chosen, op.top_k)
    gates = scores.gather(1, ids)
    if op.normalise:
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
    op.ids[:count].copy_(ids)
    op.gates[:count].copy_(gates * op.scale)


_LOWEST = torch.finfo(torch.float32).min


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices int64 [T, count] of the largest scores [T, n], in descending order, ties to the lower index."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


def combine(op: Combine, step: Step, compute: torch.dtype) -> None:
    """Execute a Combine on ``step``: see ops.Combine."""
    count = len(step.tokens)
    gates, out = op.gates[:count].to(compute), op.out[:count]
    source = op.source[:count].to(compute).view(count, gates.shape[1], out.shape[1])
    total = torch.zeros(count, out.shape[1], dtype=compute)
    for rank in range(gates.shape[1]):
        total = total + gates[:, rank, None] * source[:, rank]
    out.copy_(out.to(compute) + total)


def why_no_latent(op: AppendLatent) -> str | None:
    """Why an AppendLatent is outside its contract; None when it is not."""
    store, heads = op.store, op.num_heads
    if not store.value_in_key:
        return "latent rows need a store whose values lie in its keys"
    rank, rope = store.v_head_dim, store.head_dim - store.v_head_dim
    if rope < 0 or (op.cos is not None and 2 * op.cos.shape[-1] != rope):
        return f"a rotation of {0 if op.cos is None else 2 * op.cos.shape[-1]} channels is not the {rope} of the rows"
    if heads <= 0 or op.q.shape[-1] % heads or op.q.shape[-1] // heads < rope:
        return f"queries of {op.q.shape[-1]} channels are not {heads} heads with {rope} rotated channels each"
    absorbed = heads * rank if op.absorbed is None else op.absorbed.shape[-1]
    if op.kv.shape[-1] != store.head_dim or absorbed != heads * rank:
        return (
            f"rows of {op.kv.shape[-1]} and absorbed queries of {absorbed} channels do not fit "
            f"{heads} heads over latents of {rank} + {rope}"
        )
    width = op.q.shape[-1] if op.absorbed is None else heads * store.head_dim
    if op.q_out.shape[-1] != width:
        return f"{heads} heads give {width} channels of queries, not {op.q_out.shape[-1]}"
    return None


def why_no_expanded(op: AttendExpanded) -> str | None:
    """Why an AttendExpanded is outside its contract; None when it is not."""
    store, heads = op.store, op.num_heads
    if not store.value_in_key:
        return "only latent rows can be expanded"
    if heads < 1 or len(op.keys) != heads or len(op.values) != heads:
        return f"{len(op.keys)} weights of keys and {len(op.values)} of values do not expand {heads} heads"
    for weights in (op.keys, op.values):
        first = weights[0]
        if any((w.n, w.k, w.dtype, w.glu) != (first.n, store.v_head_dim, store.dtype, False) for w in weights):
            return f"weights that expand latents are [n, {store.v_head_dim}] of one n, in {store.dtype.name} as stored"
        if first.n % TILE:
            return f"keys or values of {first.n} channels are not whole vectors of {TILE}"
    rope = store.head_dim - store.v_head_dim
    widths = (heads * (op.keys[0].n + rope), heads * op.values[0].n)
    if (op.q.shape[-1], op.out.shape[-1]) != widths:
        return f"queries and outputs of {op.q.shape[-1]} and {op.out.shape[-1]} channels are not {widths}"
    return None


def why_no_grouped(op: GroupedLinear) -> str | None:
    """Why a GroupedLinear is outside its contract; None when it is not."""
    if not op.weights or op.slots < 1:
        return f"{len(op.weights)} weights in {op.slots} slots multiply nothing"
    first = op.weights[0]
    if any((w.n, w.k, w.dtype, w.glu) != (first.n, first.k, first.dtype, first.glu) for w in op.weights):
        return "its weights differ in shape or type"
    if op.ids is None and len(op.weights) != op.slots:
        return f"{op.slots} slots without ids need as many weights, not {len(op.weights)}"
    if op.ids is not None and (op.ids.dtype != torch.int32 or op.ids.dim() != 2 or op.ids.shape[1] != op.slots):
        return f"ids are {op.ids.dtype} {list(op.ids.shape)}, not int32 [T, {op.slots}]"
    if op.epilogue not in ("store", "glu", "act"):
        return f"epilogue {op.epilogue!r} is not one of a grouped product: use store, glu or act"
    if op.epilogue != "store" and op.activation not in ACTIVATIONS:
        return f"activation {op.activation!r} is unknown: use one of {', '.join(ACTIVATIONS)}"
    if (op.epilogue == "glu") != first.glu:
        return f"epilogue {op.epilogue!r} does not go with weights {'with' if first.glu else 'without'} gate rows"
    if op.scale != 1.0 and op.epilogue != "store":
        return f"a scale belongs to what is stored, not to epilogue {op.epilogue!r}"
    if op.norm is not None and (op.source_stride or op.norm.weight.numel() != first.k):
        return "a norm goes with one row that all slots read, as wide as itself"
    if op.source_stride < 0 or op.source.shape[-1] < (op.slots - 1) * op.source_stride + first.k:
        return (
            f"rows of {op.source.shape[-1]} channels end before slot {op.slots - 1} of {first.k}, "
            f"{op.source_stride} apart"
        )
    width = first.n // 2 if first.glu else first.n
    if op.out.shape[-1] != op.slots * width:
        return f"{op.slots} slots of {width} channels do not fit an output of {op.out.shape[-1]}"
    return None


def why_no_route(op: Route) -> str | None:
    """Why a Route is outside its contract; None when it is not."""
    experts = op.scores.shape[-1]
    if op.scoring not in ("softmax", "sigmoid") or op.group_score not in ("max", "top2"):
        return f"scoring {op.scoring!r} or group score {op.group_score!r} is unknown: softmax, sigmoid; max, top2"
    if op.groups < 1 or experts % op.groups or not 1 <= op.top_groups <= op.groups:
        return f"{op.top_groups} of {op.groups} groups of {experts} experts cannot be chosen"
    if op.group_score == "top2" and op.groups > 1 and experts // op.groups < 2:
        return f"groups of {experts // op.groups} experts have no two best"
    eligible = experts // op.groups * (op.top_groups if op.groups > 1 else 1)
    if not 1 <= op.top_k <= eligible:
        return f"{op.top_k} of {eligible} eligible experts cannot be chosen"
    if op.ids.shape[-1] != op.top_k or op.gates.shape[-1] != op.top_k or op.ids.dtype != torch.int32:
        return (
            f"ids {op.ids.dtype} {list(op.ids.shape)} and gates {list(op.gates.shape)} are not int32 and float32 of "
            f"{op.top_k} ranks"
        )
    if op.bias is not None and (op.bias.numel() != experts or op.bias.dtype != torch.float32):
        return f"a bias of {op.bias.numel()} {op.bias.dtype} does not fit {experts} experts in float32"
    return None


def why_no_combine(op: Combine) -> str | None:
    """Why a Combine is outside its contract; None when it is not."""
    ranks, width = op.gates.shape[-1], op.out.shape[-1]
    if ranks < 1 or op.source.shape[-1] != ranks * width:
        return f"{op.source.shape[-1]} channels are not {ranks} ranks of {width}"
    return None
