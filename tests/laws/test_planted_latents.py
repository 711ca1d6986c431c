"""Faults of latents and experts put in on purpose: each must be caught, by the right row, at the right operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from faulty import failing, faulty, rows
from kvist.base.dtypes import FLOAT32
from kvist.kernels.blockformat import read_k, write_kv
from kvist.kernels.native import NativeBackend, NativeExecutor
from kvist.kernels.ops import AppendLatent, Attend, Combine, Linear, Op, Route, Step
from kvist.kernels.reference_parts import rotate
from kvist.spec.model import MixtureOfExperts
from random_models import KINDS, Kind, latent_of

LATENT = KINDS["latents of queries too, YaRN"]
PLAIN = Kind(latent=LATENT.latent, heads=LATENT.heads)
EXPERTS = KINDS["latents and experts"]
Native = Callable[[Step], None]


def test_without_a_fault_every_row_holds() -> None:
    for kind in (LATENT, EXPERTS, KINDS["experts in groups"]):
        assert failing(rows(faulty(lambda backend, op, step, native: False, kind))) == set()


def test_a_wrong_mscale() -> None:
    """Every path has it, and position 0 cannot show it: only the judge, which works the scale out itself, can."""
    a = latent_of(LATENT)

    def fault(backend: NativeBackend, op: Op, step: Step, native: Native) -> bool:
        if not isinstance(op, AppendLatent):
            return False
        assert op.scale > 1.05 * a.qk_head_dim**-0.5
        NativeExecutor(backend, [replace(op, scale=a.qk_head_dim**-0.5)]).run(step)
        return True

    found = rows(faulty(fault, LATENT), "token by token", "chunks of 64", "truncate and continue")
    assert failing(found) == {"float64 judge"}


def test_the_scale_of_the_latent_in_decoding() -> None:
    a = latent_of(LATENT)

    def fault(backend: NativeBackend, op: Op, step: Step, native: Native) -> bool:
        if not isinstance(op, AppendLatent) or len(step.tokens) > 1:
            return False
        NativeExecutor(backend, [replace(op, scale=(a.kv_lora_rank + a.qk_rope_head_dim) ** -0.5)]).run(step)
        return True

    found = rows(faulty(fault, LATENT), "token by token", "chunks of 64")
    assert "token by token" in failing(found) and "chunks of 64" not in failing(found)
    first = found["token by token"].first_difference
    assert first is not None and (first.layer, first.operation) == (0, "append")


def test_rope_through_the_latent() -> None:
    """The first channels of c_KV are turned as well: every path alike, and a function that nobody trained."""

    def fault(backend: NativeBackend, op: Op, step: Step, native: Native) -> bool:
        if not isinstance(op, AppendLatent) or op.cos is None or op.sin is None:
            return False
        native(step)
        positions, table = step.positions.long(), step.tables[op.store.group]
        for b in range(len(step.starts) - 1):
            at = positions[int(step.starts[b]) : int(step.starts[b + 1])]
            stored = torch.cat([read_k(op.store, table[b], int(p), int(p) + 1) for p in at])
            write_kv(op.store, table[b], at, rotate(stored.float(), op.cos[at], op.sin[at]), None)
        return True

    found = rows(faulty(fault, PLAIN), "token by token", "chunks of 64", "truncate and continue")
    assert failing(found) == {"float64 judge"}


def test_a_rotated_key_for_each_head() -> None:
    """Head h meets the rotated key of another order of channels, as if every head had one of its own."""

    def fault(backend: NativeBackend, op: Op, step: Step, native: Native) -> bool:
        if not isinstance(op, AppendLatent):
            return False
        native(step)
        count, rank = len(step.tokens), op.store.v_head_dim
        q = op.q_out[:count].view(count, op.num_heads, op.store.head_dim)
        for head in range(op.num_heads):
            q[:, head, rank:] = q[:, head, rank:].roll(head, -1)
        return True

    assert failing(rows(faulty(fault, PLAIN), "token by token", "chunks of 64")) == {"float64 judge"}


def test_stale_rows_that_were_expanded_once() -> None:
    """Expanded keys kept beside the latents, and not forgotten when a request is cut back."""
    kept: dict[tuple[AppendLatent, int, int], torch.Tensor] = {}

    def fault(backend: NativeBackend, op: Op, step: Step, native: Native) -> bool:
        if not isinstance(op, AppendLatent):
            return False
        native(step)
        size, table = op.store.block_size, step.tables[op.store.group]
        for b in range(len(step.starts) - 1):
            for t in range(int(step.starts[b]), int(step.starts[b + 1])):
                position = int(step.positions[t])
                place = (op, int(table[b, position // size]), position % size)
                at = torch.tensor([position])
                if place in kept:
                    write_kv(op.store, table[b], at, kept[place], None)
                else:
                    kept[place] = read_k(op.store, table[b], position, position + 1).clone()
        return True

    found = rows(faulty(fault, PLAIN), "truncate and continue", "chunks of 64", "token by token")
    assert "truncate and continue" in failing(found)
    assert not {"chunks of 64", "token by token"} & failing(found)
    first = found["truncate and continue"].first_difference
    assert first is not None and (first.layer, first.operation) == (0, "append")


def test_expanding_in_prefill() -> None:
    """The same function in exact arithmetic, another one in floating point: what two forms do to law 1."""

    def fault(backend: NativeBackend, op: Op, step: Step, native: Native) -> bool:
        if not isinstance(op, Attend) or len(step.tokens) == 1 or len(step.starts) != 2:
            return False
        count, store = len(step.tokens), op.store
        length = int(step.positions[-1]) + 1
        k = read_k(store, step.tables[store.group][0], 0, length)[:, 0].float()
        q = op.q[:count].float().view(count, op.num_heads, store.head_dim)
        scores = torch.einsum("thd,jd->thj", q, k)
        unseen = torch.arange(length)[None, None, :] > step.positions[:, None, None]
        p = torch.softmax(scores.masked_fill(unseen, -torch.inf), -1)
        op.out[:count] = torch.einsum("thj,jd->thd", p, k[:, : store.v_head_dim]).flatten(1)
        return True

    found = rows(faulty(fault, PLAIN), "token by token", "chunks of 64")
    assert "token by token" in failing(found) and "float64 judge" not in failing(found)
    first = found["token by token"].first_difference
    assert first is not None and (first.layer, first.operation) == (0, "attend")


def test_experts_added_in_the_order_of_their_numbers_when_many_tokens_run() -> None:
    """What a scatter over experts does: the order of a token's sum depends on how the step was put together."""

    def fault(backend: NativeBackend, op: Op, step: Step, native: Native) -> bool:
        if not isinstance(op, Combine) or len(step.tokens) < 32:
            return False
        count, k = len(step.tokens), op.gates.shape[1]
        parts = op.source[:count].view(count, k, -1) * op.gates[:count, :, None]
        total = torch.zeros_like(op.out[:count])
        for rank in range(k - 1, -1, -1):
            total += parts[:, rank]
        op.out[:count] += total
        return True

    found = rows(faulty(fault, EXPERTS), "token by token", "changing neighbours (0)")
    assert failing(found) == {"token by token", "changing neighbours (0)"}
    first = found["token by token"].first_difference
    assert first is not None and (first.layer, first.operation) == (1, "experts")


def test_gates_that_carry_the_bias_of_the_choice() -> None:
    def fault(backend: NativeBackend, op: Op, step: Step, native: Native) -> bool:
        if not isinstance(op, Route) or op.bias is None:
            return False
        native(step)
        count = len(step.tokens)
        op.gates[:count] += 0.5 * op.bias[op.ids[:count].long()]
        return True

    assert failing(rows(faulty(fault, EXPERTS), "token by token", "chunks of 64")) == {"float64 judge"}


def test_a_router_in_bfloat16() -> None:
    """Some tokens get other experts: on every path the same, and far from what the model says."""

    def fault(backend: NativeBackend, op: Op, step: Step, native: Native) -> bool:
        if not isinstance(op, Linear) or not op.name.endswith("router"):
            return False
        native(step)
        count = len(step.tokens)
        op.out[:count] = op.out[:count].bfloat16().float()
        return True

    mixture = EXPERTS.experts
    assert isinstance(mixture, MixtureOfExperts)
    found = rows(faulty(fault, EXPERTS, FLOAT32), "token by token", "chunks of 64")
    assert failing(found) == {"float64 judge"}


def test_a_group_of_neighbours_too_many() -> None:
    def fault(backend: NativeBackend, op: Op, step: Step, native: Native) -> bool:
        if not isinstance(op, Route) or op.groups == 1:
            return False
        NativeExecutor(backend, [replace(op, top_groups=op.top_groups + 1)]).run(step)
        return True

    assert failing(rows(faulty(fault, EXPERTS), "token by token", "chunks of 64")) == {"float64 judge"}
