"""Faults put in on purpose: each must be caught, by the right row, at the right operation.

A faulty backend runs the real kernels operation by operation and does one thing wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from faulty import failing, faulty, rows
from kvist.base.dtypes import BFLOAT16, FLOAT32
from kvist.kernels.blockformat import read_k, read_v
from kvist.kernels.native import NativeBackend, NativeExecutor
from kvist.kernels.ops import SPLIT, Append, Attend, Linear, Op, Step
from kvist.kernels.reference_parts import norm
from random_models import Kind


def test_without_a_fault_every_row_holds() -> None:
    for dtype in (FLOAT32, BFLOAT16):
        found = rows(faulty(lambda backend, op, step, native: False, dtype=dtype))
        # A random model's logits are far from a trained one's, so the bfloat16 bound says nothing here.
        assert failing(found) - ({"float64 judge"} if dtype == BFLOAT16 else set()) == set()


def test_an_off_by_one_length() -> None:
    def fault(backend: NativeBackend, op: Op, step: Step, native: Callable[[Step], None]) -> bool:
        if not isinstance(op, Attend) or len(step.tokens) != len(step.starts) - 1:
            return False
        native(replace(step, positions=(step.positions - 1).clamp(min=0)))  # decode: the newest key is not seen
        return True

    found = rows(faulty(fault), "token by token", "chunks of 64")
    assert "token by token" in failing(found)
    assert found["token by token"].first_difference is not None
    assert found["token by token"].first_difference.operation == "attend"
    assert found["token by token"].first_difference.layer == 0
    assert "chunks of 64" not in failing(found)


def test_a_reduction_split_by_thread_count() -> None:
    def fault(backend: NativeBackend, op: Op, step: Step, native: Callable[[Step], None]) -> bool:
        if not isinstance(op, Linear) or not op.name.endswith("qkv"):
            return False
        assert op.norm is not None
        x = norm(op.source[: len(step.tokens)], op.norm, torch.float32).double()
        w = op.weight.rows(torch.arange(op.weight.n)).double()
        y = torch.zeros(len(x), op.weight.n)
        for part in torch.arange(op.weight.k).chunk(backend.threads):
            y += (x[:, part] @ w[:, part].T).float()
        op.out[: len(x)] = y
        return True

    found = rows(faulty(fault), "1 thread", "2 threads", "3 threads")
    assert failing(found) >= {"2 threads", "3 threads"}
    assert "1 thread" not in failing(found)
    assert found["3 threads"].first_difference is not None
    assert (found["3 threads"].first_difference.layer, found["3 threads"].first_difference.operation) == (0, "qkv")


def test_a_product_that_depends_on_the_number_of_rows() -> None:
    def fault(backend: NativeBackend, op: Op, step: Step, native: Callable[[Step], None]) -> bool:
        if not isinstance(op, Linear) or not op.name.endswith("qkv"):
            return False
        assert op.norm is not None
        x = norm(op.source[: len(step.tokens)], op.norm, torch.float32)
        w = op.weight.rows(torch.arange(op.weight.n))
        # Few rows are summed forwards, many backwards: what tile choice by row count amounts to.
        order = torch.arange(op.weight.k) if len(x) < 32 else torch.arange(op.weight.k - 1, -1, -1)
        y = torch.zeros(len(x), op.weight.n)
        for k in order.tolist():
            y += x[:, k, None] * w[:, k]
        op.out[: len(x)] = y
        return True

    found = rows(faulty(fault), "token by token", "chunks of 7", "chunks of 64")
    assert failing(found) >= {"token by token", "chunks of 7"}
    assert "chunks of 64" not in failing(found)
    assert found["chunks of 7"].first_difference is not None
    assert found["chunks of 7"].first_difference.operation == "qkv"


def carried_maximum(op: Attend, step: Step) -> None:
    """A running maximum: what a split's probabilities are rounded against depends on the splits before it."""
    group = op.num_heads // op.store.num_kv_heads
    q = op.q[: len(step.tokens)].float().view(len(step.tokens), op.num_heads, -1)
    table = step.tables[op.store.group][0]
    length = int(step.positions[-1]) + 1
    k, v = (read(op.store, table, 0, length).float().repeat_interleave(group, 1) for read in (read_k, read_v))
    for t, position in enumerate(step.positions.tolist()):
        top = torch.full((op.num_heads,), -torch.inf)
        total, out = torch.zeros(op.num_heads), torch.zeros(op.num_heads, op.store.v_head_dim)
        for start in range(0, position + 1, SPLIT):
            keys = slice(start, min(start + SPLIT, position + 1))
            scores = torch.einsum("hd,khd->hk", q[t], k[keys])
            new = torch.maximum(top, scores.amax(-1))
            p = torch.exp(scores - new[:, None]).bfloat16().float()
            shrink = torch.exp(top - new)
            total = total * shrink + p.sum(-1)
            out = out * shrink[:, None] + torch.einsum("hk,khd->hd", p, v[keys])
            top = new
        op.out[t] = (out / total[:, None]).flatten()


def test_a_running_maximum_carried_across_splits() -> None:
    def fault(backend: NativeBackend, op: Op, step: Step, native: Callable[[Step], None]) -> bool:
        # In prefill only, as a flash-style kernel beside a split decode kernel would have it.
        if not isinstance(op, Attend) or len(step.tokens) == 1 or len(step.starts) != 2:
            return False
        carried_maximum(op, step)
        return True

    found = rows(faulty(fault, Kind(windows=(None,)), BFLOAT16), "token by token")
    assert "token by token" in failing(found)
    assert found["token by token"].first_difference is not None
    assert found["token by token"].first_difference.operation == "attend"


def test_a_stale_block() -> None:
    written: set[tuple[int, int, int, int]] = set()

    def fault(backend: NativeBackend, op: Op, step: Step, native: Callable[[Step], None]) -> bool:
        if not isinstance(op, Append):
            return False
        before = op.store.data.clone()
        native(step)
        size, table = op.store.block_size, step.tables[op.store.group]
        for b in range(len(step.starts) - 1):
            for t in range(int(step.starts[b]), int(step.starts[b + 1])):
                index = int(step.positions[t]) // size
                place = (op.store.data.data_ptr(), int(table[b, index]), int(step.positions[t]) % size, size)
                if place in written and place[2] == 0:
                    op.store.data[place[1]] = before[place[1]]  # a block once used keeps what it had
                written.add(place)
        return True

    found = rows(faulty(fault, Kind(windows=(None,))), "truncate and continue", "chunks of 64")
    assert "truncate and continue" in failing(found)
    assert "chunks of 64" not in failing(found)


def test_a_window_of_one_too_many() -> None:
    def fault(backend: NativeBackend, op: Op, step: Step, native: Callable[[Step], None]) -> bool:
        if not isinstance(op, Attend) or op.window is None:
            return False
        NativeExecutor(backend, [replace(op, window=op.window + 1)]).run(step)
        return True

    found = rows(faulty(fault, Kind(windows=(40, None))), "chunks of 64")
    assert "float64 judge" in failing(found)  # every path is wrong alike: only the judge can tell


def test_a_rotation_by_slot_instead_of_position() -> None:
    def fault(backend: NativeBackend, op: Op, step: Step, native: Callable[[Step], None]) -> bool:
        if not isinstance(op, Append) or op.cos is None or op.sin is None:
            return False
        slots = torch.arange(len(op.cos)) % op.store.block_size
        NativeExecutor(backend, [replace(op, cos=op.cos[slots].contiguous(), sin=op.sin[slots].contiguous())]).run(step)
        return True

    found = rows(faulty(fault), "blocks of 16", "blocks of 32", "blocks of 128", "blocks of 256", "chunks of 64")
    assert failing(found) >= {"blocks of 16", "blocks of 32", "blocks of 128", "blocks of 256", "float64 judge"}
    assert found["blocks of 16"].first_difference is not None
    assert found["blocks of 16"].first_difference.operation == "append"
    assert found["blocks of 16"].first_difference.position == 16


def test_a_neighbours_row() -> None:
    def fault(backend: NativeBackend, op: Op, step: Step, native: Callable[[Step], None]) -> bool:
        if not isinstance(op, Attend) or len(step.starts) < 3:
            return False
        wrong = step.tables[op.store.group].clone()
        wrong[-1, 0] = wrong[0, 0]  # the last request reads the first one's first block
        native(replace(step, tables=(wrong,)))
        return True

    found = rows(faulty(fault), "changing neighbours (0)", "chunks of 64")
    assert "changing neighbours (0)" in failing(found)
    assert found["changing neighbours (0)"].first_difference is not None
    assert found["changing neighbours (0)"].first_difference.operation == "attend"
    assert "chunks of 64" not in failing(found)


def test_padding_lanes_multiplied_by_zero() -> None:
    def fault(backend: NativeBackend, op: Op, step: Step, native: Callable[[Step], None]) -> bool:
        if not isinstance(op, Attend) or len(step.starts) != 2:
            return False
        group, store = op.num_heads // op.store.num_kv_heads, op.store
        table = step.tables[store.group][0]
        stop = len(table) * store.block_size  # whole blocks, what was never written included
        k, v = (read(store, table, 0, stop).float().repeat_interleave(group, 1) for read in (read_k, read_v))
        q = op.q[: len(step.tokens)].float().view(len(step.tokens), op.num_heads, -1)
        scores = torch.einsum("thd,khd->thk", q, k)
        unseen = torch.arange(stop)[None, None, :] > step.positions[:, None, None]
        p = torch.softmax(scores.masked_fill(unseen, -torch.inf), -1)
        op.out[: len(step.tokens)] = torch.einsum("thk,khd->thd", p, v).flatten(1)  # 0 times NaN
        return True

    found = rows(faulty(fault, Kind(windows=(None,))), "chunks of 64")
    assert "float64 judge" in failing(found)
    assert "not finite" in found["float64 judge"].detail
    assert "chunks of 64" in failing(found)
