"""Every other operation against its formula in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32
from kvist.base.errors import KernelError, NotResident
from kvist.kernels import reference_parts
from kvist.kernels.blockformat import read_k, read_v
from kvist.kernels.ops import Append, Embed, Linear, NormAdd, NormWeight, Step, torch_dtype
from kvist.kernels.reference import ReferenceBackend
from kvist.kernels.reference_parts import ReferenceWeight
from kvist.verify.compare import JUDGE, POINTWISE, assert_close, bits_equal, linear_bound, rounding_bound
from kvist.verify.kernels import Shape, new_store

FLOAT = ReferenceBackend()
DOUBLE = ReferenceBackend(torch.float64)
COMPUTE = pytest.mark.parametrize("backend", [FLOAT, DOUBLE], ids=lambda b: b.name)
WEIGHTS = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=lambda d: d.name)


def step_of(*counts: int, rows: list[int] | None = None, tables=(), positions: list[int] | None = None) -> Step:
    total = sum(counts)
    return Step(
        tokens=torch.arange(total, dtype=torch.int32) % 7,
        positions=torch.tensor(positions if positions is not None else list(range(total)), dtype=torch.int32),
        starts=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        tables=tables,
        rows=torch.tensor(rows or [], dtype=torch.int32),
    )


def filled(n: int, k: int, dtype, glu: bool = False) -> ReferenceWeight:
    weight = FLOAT.weight(n, k, dtype, glu)
    weight.fill(0, torch.randn(n, k) / math.sqrt(k))
    return weight


def rms(x: torch.Tensor, weight: NormWeight) -> torch.Tensor:
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + weight.eps) ** -0.5 * weight.weight.double()


def rounded(x: torch.Tensor, dtype, backend: ReferenceBackend) -> torch.Tensor:
    """What enters a product: rounded once to the weight's type, but not in the judge."""
    return x.float().to(torch_dtype(dtype)).double() if backend is FLOAT else x.double()


def buffers(backend: ReferenceBackend) -> torch.dtype:
    return torch.float32 if backend is FLOAT else torch.float64


def bound(backend: ReferenceBackend, k: int) -> float:
    return linear_bound(k) if backend is FLOAT else JUDGE


@COMPUTE
@WEIGHTS
def test_embed_takes_rows_and_scales_them(backend, dtype):
    weight = filled(7, 12, dtype)
    out = torch.full((6, 12), torch.nan, dtype=buffers(backend))  # longer than the step
    backend.compile([Embed("embed", weight, 3.7, out)]).run(step_of(2, 2))
    assert_close(out[:4], weight.data[:4].double() * 3.7, bound(backend, 1))
    assert out[4:].isnan().all()


@COMPUTE
@WEIGHTS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("epilogue", ["store", "add", "glu"])
def test_linear(backend, dtype, normed, bias, epilogue):
    n, k, count = 10, 48, 5
    weight = filled(n, k, dtype, epilogue == "glu")
    source = torch.randn(count + 2, k, dtype=buffers(backend))
    norm = NormWeight(torch.rand(k) + 0.5, 1e-3) if normed else None
    b = torch.randn(n) if bias else None
    x = rounded(source[:count] if norm is None else rms(source[:count], norm), dtype, backend)
    y = x @ weight.data.double().T + (0 if b is None else b.double())
    width = n // 2 if epilogue == "glu" else n
    start = torch.randn(count + 2, width, dtype=buffers(backend))
    for activation in ("silu", "gelu_tanh"):
        out = start.clone()
        op = Linear("linear", source, weight, out, epilogue, norm, b, activation)
        backend.compile([op]).run(step_of(2, 3))
        if epilogue == "glu":
            gate, up = y[:, :width], y[:, width:]
            cubic = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
            expected = (gate / (1 + (-gate).exp()) if activation == "silu" else 0.5 * gate * (1 + cubic)) * up
        else:
            expected = y + (start[:count] if epilogue == "add" else 0)
        assert_close(out[:count], expected, bound(backend, k))
        assert bits_equal(out[count:], start[count:])


@COMPUTE
def test_logits_of_wanted_rows_with_and_without_soft_cap(backend):
    weight, source = filled(20, 16, FLOAT32), torch.randn(6, 16, dtype=buffers(backend)) * 9
    norm = NormWeight(torch.rand(16) + 0.5, 1e-5)
    out = torch.full((6, 20), torch.nan, dtype=buffers(backend))
    op = Linear("head", source, weight, out, norm=norm, wanted=True)
    expected = rms(source[[5, 0, 5]], norm) @ weight.data.double().T
    backend.compile([op]).run(step_of(6, rows=[5, 0, 5]))
    assert_close(out[:3], expected, bound(backend, 16))
    assert out[3:].isnan().all()
    backend.compile([replace(op, softcap=0.7)]).run(step_of(6, rows=[5, 0, 5]))
    assert_close(out[:3], 0.7 * torch.tanh(expected / 0.7), bound(backend, 16))
    before = out.clone()
    backend.compile([op]).run(step_of(6))
    assert bits_equal(out, before)  # nobody wants logits: nothing is written


def test_a_normalised_row_is_rounded_once_to_the_weights_type():
    weight, source = filled(4, 64, BFLOAT16), torch.randn(3, 64)
    norm = NormWeight(torch.rand(64) + 0.5, 1e-5)
    rounded_out, exact = torch.empty(3, 4), torch.empty(3, 4, dtype=torch.float64)
    op = Linear("linear", source, weight, rounded_out, norm=norm)
    FLOAT.compile([op]).run(step_of(3))
    DOUBLE.compile([replace(op, out=exact)]).run(step_of(3))
    assert_close(exact, rms(source, norm) @ weight.data.double().T, JUDGE)
    with pytest.raises(AssertionError):
        assert_close(rounded_out, exact, linear_bound(64))
    assert_close(rounded_out, exact, linear_bound(64) + rounding_bound("bfloat16"))


def test_activations_go_out_in_the_buffers_type():
    weight, source = filled(8, 32, BFLOAT16, glu=True), torch.randn(3, 32).bfloat16()
    narrow, wide = torch.empty(3, 4, dtype=torch.bfloat16), torch.empty(3, 4)
    op = Linear("glu", source, weight, narrow, "glu")
    FLOAT.compile([op, replace(op, out=wide)]).run(step_of(3))
    assert bits_equal(narrow, wide.bfloat16())


@WEIGHTS
def test_slices_and_weights_of_other_backends_give_the_same(dtype, monkeypatch):
    class Foreign:
        """A weight known only by the protocol."""

        def __init__(self, inner: ReferenceWeight) -> None:
            self.n, self.k, self.dtype, self.glu = inner.n, inner.k, inner.dtype, inner.glu
            self.rows = inner.rows

    weight, source = filled(37, 24, dtype), torch.randn(5, 24)
    whole = reference_parts.product(source, weight)
    expected = source.double() @ weight.data.double().T
    assert_close(whole, expected, linear_bound(24))
    for elements in (1, 24 * 5, 24 * 36, 24 * 37):
        monkeypatch.setattr(reference_parts, "SLICE", elements)
        for form in (weight, Foreign(weight)):
            assert_close(reference_parts.product(source, form), expected, linear_bound(24))
            assert_close(reference_parts.product(source.double(), form), expected, JUDGE)


@COMPUTE
def test_norm_add(backend):
    source, start = torch.randn(5, 24, dtype=buffers(backend)) * 3, torch.randn(5, 24, dtype=buffers(backend))
    norm, out = NormWeight(torch.rand(24), 0.1), start.clone()
    backend.compile([NormAdd("post", source, norm, out)]).run(step_of(1, 3))
    assert_close(out[:4], start[:4].double() + rms(source[:4], norm), bound(backend, 1))
    assert bits_equal(out[4:], start[4:])


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_append_stores_what_the_formula_says_where_the_tables_say(data):
    backend = data.draw(st.sampled_from([FLOAT, DOUBLE]))
    dtype = data.draw(st.sampled_from([FLOAT32, BFLOAT16, FLOAT16]))
    G, per_group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    D, Dv = data.draw(st.sampled_from([4, 8, 10])), data.draw(st.sampled_from([3, 8]))
    half = data.draw(st.none() | st.integers(1, D // 2))  # partial rotary too
    normed = data.draw(st.booleans())
    counts = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3).filter(any))
    H, count, scale = G * per_group, sum(counts), 0.35
    store = new_store(Shape(num_kv_heads=G, head_dim=D, v_head_dim=Dv, dtype=dtype), 3 * len(counts), group=1)
    table = torch.randperm(3 * len(counts)).view(len(counts), 3).to(torch.int32)
    first = [data.draw(st.integers(0, 48 - c)) for c in counts]
    positions = [p for start, c in zip(first, counts, strict=True) for p in range(start, start + c)]
    qkv = torch.randn(count + 1, (H + G) * D + G * Dv, dtype=buffers(backend))
    q_out = torch.empty(count + 1, H, D, dtype=torch.bfloat16 if dtype == BFLOAT16 else buffers(backend))
    cos, sin = (None, None) if half is None else (torch.randn(48, half), torch.randn(48, half))
    q_norm, k_norm = (NormWeight(torch.rand(D) + 0.5, 1e-3) for _ in "qk") if normed else (None, None)
    op = Append("append", qkv, q_out, store, H, scale, cos, sin, q_norm, k_norm)
    backend.compile([op]).run(step_of(*counts, tables=(torch.empty(0), table), positions=positions))

    def expected(x: torch.Tensor, norm: NormWeight | None, position: int) -> torch.Tensor:
        x = x.double() if norm is None else rms(x, norm)
        out = x.clone()
        for i in range(half or 0):
            c, s = cos[position, i].double(), sin[position, i].double()
            out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
        return out

    exact = POINTWISE if backend is FLOAT else JUDGE
    stored = exact if dtype == FLOAT32 and backend is FLOAT else rounding_bound(dtype.name)
    queried = rounding_bound("bfloat16") if dtype == BFLOAT16 else exact
    for t, position in enumerate(positions):
        b = next(i for i in range(len(counts)) if t < sum(counts[: i + 1]))
        got_k, got_v = (read(store, table[b], position, position + 1)[0] for read in (read_k, read_v))
        for h in range(H):
            want = expected(qkv[t, h * D : (h + 1) * D], q_norm, position) * scale
            assert_close(q_out[t, h], want, queried)
        for g in range(G):
            at = (H + g) * D
            assert_close(got_k[g], expected(qkv[t, at : at + D], k_norm, position), stored)
            at = (H + G) * D + g * Dv
            assert bits_equal(got_v[g], qkv[t, at : at + Dv].to(torch_dtype(dtype)))
    # Nothing was written anywhere else.
    elements = store.data.view(torch_dtype(dtype))
    assert int(elements.isnan().sum()) == elements.numel() - len(positions) * G * (D + Dv)


def test_append_refuses_positions_without_a_block_or_a_rotation():
    store = new_store(Shape(num_kv_heads=1, head_dim=4, dtype=FLOAT32), 2)
    qkv, q_out = torch.randn(1, 12), torch.empty(1, 1, 4)
    op = Append("layers.3.append", qkv, q_out, store, 1, 1.0, torch.ones(20, 2), torch.zeros(20, 2))
    table = torch.tensor([[0, -1]], dtype=torch.int32)
    with pytest.raises(NotResident, match="position 16 has no block"):
        FLOAT.compile([op]).run(step_of(1, tables=(table,), positions=[16]))
    with pytest.raises(KernelError, match=r"layers\.3\.append: position 20 lies beyond .* 20 positions"):
        FLOAT.compile([op]).run(step_of(1, tables=(table,), positions=[20]))
    assert store.data.view(torch.float32).isnan().all()


def test_operations_run_in_order_and_one_by_one():
    weight, x = filled(8, 8, FLOAT32), torch.randn(3, 8)
    middle, out = torch.empty(3, 8), torch.empty(3, 8)
    ops = [Linear("a", x, weight, middle), Linear("b", middle, weight, out)]
    executor = FLOAT.compile(ops, threads=2)
    executor.run(step_of(3))
    whole = out.clone()
    out.fill_(torch.nan)
    for op in executor.ops:
        executor.run_one(op, step_of(3))
    assert bits_equal(out, whole)
    assert_close(out, x.double() @ weight.data.double().T @ weight.data.double().T, linear_bound(8))


def test_weights_are_filled_row_by_row_and_refuse_what_does_not_fit():
    weight = FLOAT.weight(6, 4, BFLOAT16, glu=True)
    rows = torch.randn(6, 4)
    weight.fill(4, rows[4:])
    weight.fill(0, rows[:4].bfloat16())
    assert bits_equal(weight.rows(torch.tensor([5, 0, 5], dtype=torch.int32)), rows[[5, 0, 5]].bfloat16().float())
    assert weight.nbytes == 6 * 4 * 2
    for row, bad in ((5, rows[:2]), (-1, rows[:1]), (0, rows[:, :3]), (0, rows[0])):
        with pytest.raises(KernelError, match="weight of 6 rows of 4"):
            weight.fill(row, bad)
    for n, k, dtype, glu in ((0, 4, FLOAT32, False), (3, 4, FLOAT32, True), (4, 4, FLOAT16, False)):
        with pytest.raises(KernelError):
            FLOAT.weight(n, k, dtype, glu)
    with pytest.raises(KernelError, match="float16"):
        ReferenceBackend(torch.float16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epilogue": "sub"}, "'sub' is unknown"),
        ({"epilogue": "glu"}, "without gate rows"),
        ({"epilogue": "add", "softcap": 3.0}, "soft cap"),
        ({"out": torch.empty(3, 9)}, "not 8 into 9"),
        ({"source": torch.empty(3, 9)}, "not 9 into 8"),
    ],
)
def test_operations_outside_the_contract_are_refused_by_name(change, words):
    op = Linear("layers.0.o", torch.empty(3, 8), filled(8, 8, FLOAT32), torch.empty(3, 8))
    assert FLOAT.refuses(op) is None
    with pytest.raises(KernelError, match=r"layers\.0\.o: .*" + words):
        FLOAT.compile([op, replace(op, **change)])
    gated = Linear(
        "up", torch.empty(3, 8), filled(8, 8, FLOAT32, glu=True), torch.empty(3, 4), "glu", activation="relu"
    )
    assert "'relu' is unknown" in str(FLOAT.refuses(gated))
