"""Packed weights, every type and variant: values to the bit, products within bounds, rows without neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.base.dtypes import BFLOAT16
from kvist.base.errors import KernelError
from kvist.kernels.fingerprint import fingerprint
from kvist.kernels.native import NativeBackend, variants
from kvist.kernels.ops import Embed, Linear, NormWeight, Step
from kvist.kernels.packed import FACTORS, PACKED_TYPES, PackedWeight, packed_bytes, strip_bytes
from kvist.kernels.reference import ReferenceBackend
from kvist.spec.gguf_types import BY_NAME, IDS
from kvist.verify.compare import PACKED_ROUNDING, assert_bits_equal, assert_close, largest_row_error, packed_bound
from packed_files import blocks, filled, unpacked

if not variants():
    pytest.skip("the native kernels are not built", allow_module_level=True)

VARIANTS = pytest.mark.parametrize("variant", variants())
KINDS = pytest.mark.parametrize("kind", PACKED_TYPES)


def step(count: int, tokens: torch.Tensor | None = None) -> Step:
    every = torch.arange(count, dtype=torch.int32)
    starts = torch.tensor([0, count], dtype=torch.int32)
    return Step(torch.zeros_like(every) if tokens is None else tokens, every, starts, (), every)


def times(backend: NativeBackend, weight: PackedWeight, x: torch.Tensor, **rest: object) -> torch.Tensor:
    out = torch.full((len(x), weight.n // 2 if weight.glu else weight.n), torch.nan)
    backend.compile([Linear("product", x, weight, out, **rest)]).run(step(len(x)))  # type: ignore[arg-type]
    return out


@VARIANTS
@KINDS
@pytest.mark.parametrize("rows", [1, 16, 33])
def test_values_are_those_of_the_gguf_package(variant, kind, rows):
    backend, raw = NativeBackend(variant, 2), blocks(kind, rows, 512, seed=rows)
    weight = backend.packed([(rows, kind)], 512)
    place = torch.randperm(rows)
    weight.fill_gguf(raw.ctypes.data, IDS[kind], rows, place)
    assert_bits_equal(weight.rows(place), unpacked(raw, kind), kind)
    tokens = torch.randint(0, rows, (9,)).to(torch.int32)
    out = torch.full((9, 512), torch.nan)
    backend.compile([Embed("embed", weight, 1.0, out)]).run(step(9, tokens))
    assert_bits_equal(out, weight.rows(tokens), "embedding rows")
    assert backend.native.strip_bytes(IDS[kind], 512) == strip_bytes(kind, 512)
    assert weight.nbytes == packed_bytes(kind, rows, 512)
    assert weight.nbytes <= 1.03 * -(-rows // 16) * 16 * 512 * BY_NAME[kind].bits / 8  # of whole strips


@VARIANTS
@KINDS
@given(
    n=st.sampled_from([1, 15, 16, 17, 32, 77]),
    k=st.sampled_from([256, 768]),
    m=st.integers(1, 40),
    seed=st.integers(0, 9),
)
@settings(max_examples=8, deadline=None)
def test_products(variant, kind, n, k, m, seed):
    backend, draw = NativeBackend(variant, 2), torch.Generator().manual_seed(seed)
    raw = blocks(kind, n, k, seed)
    x = torch.randn(m, k, generator=draw) * torch.rand(k, generator=draw) ** 4  # channels of very different size
    got = times(backend, filled(backend, raw, kind, k), x)
    expected = x.double() @ unpacked(raw, kind).double().T
    if n >= 15:  # the bound is on norms: a single output may cancel
        assert_close(got, expected, packed_bound(k), kind)
    size = x.double().abs() @ unpacked(raw, kind).double().abs().T
    assert bool(((got.double() - expected).abs() <= PACKED_ROUNDING * size + 1e-12).all())


@VARIANTS
@KINDS
def test_a_row_has_its_bits_whoever_stands_beside_it(variant, kind):
    k, raw = 512, blocks(kind, 70, 512)
    x = torch.randn(41, k)
    norm = NormWeight(torch.rand(k) + 0.5, 1e-5)
    for glu in (False, True):
        rest = {"epilogue": "glu"} if glu else {}
        one = NativeBackend(variant, 1)
        alone = torch.cat([times(one, filled(one, raw, kind, k, glu), row[None], norm=norm, **rest) for row in x])
        assert bool(torch.isfinite(alone).all())
        for threads in (1, 2, 3):
            backend = NativeBackend(variant, threads)
            weight = filled(backend, raw, kind, k, glu)
            for m in (2, 3, 4, 5, 6, 7, 12, 13, 24, 25, 41):  # at 25 every variant opens strips first
                assert_bits_equal(times(backend, weight, x[:m], norm=norm, **rest), alone[:m], f"{kind}, {m} rows")


@VARIANTS
@pytest.mark.parametrize("pair", [("q4_0", "q8_0"), ("q6_k", "q4_k"), ("q5_1", "q5_0")])
def test_segments_of_several_types(variant, pair):
    backend, k, x = NativeBackend(variant, 2), 256, torch.randn(9, 256)
    raws = [blocks(kind, 40, k, seed) for seed, kind in enumerate(pair)]
    single = [times(backend, filled(backend, raw, kind, k), x) for raw, kind in zip(raws, pair, strict=True)]
    fused = backend.packed([(40, kind) for kind in pair], k)
    glu = backend.packed([(40, kind) for kind in pair], k, glu=True)
    for weight in (fused, glu):
        for i, (raw, kind) in enumerate(zip(raws, pair, strict=True)):
            weight.fill_gguf(raw.ctypes.data, IDS[kind], 40, torch.arange(40) + 40 * i)
    for m in (1, 9):  # unpacked in registers, and into scratch
        assert_bits_equal(times(backend, fused, x[:m]), torch.cat(single, 1)[:m], "one below the other")
        gated = times(backend, glu, x[:m], epilogue="glu")
        assert_close(gated, torch.nn.functional.silu(single[0][:m].double()) * single[1][:m].double(), packed_bound(k))
    bias, out = torch.randn(80), torch.randn(9, 80)
    before = out.clone()
    backend.compile([Linear("product", x, fused, out, epilogue="add", bias=bias)]).run(step(9))
    assert_bits_equal(out, before + (torch.cat(single, 1) + bias), "bias, then added")
    with pytest.raises(KernelError, match="does not place"):  # rows of the first type where the second stands
        fused.fill_gguf(raws[0].ctypes.data, IDS[pair[0]], 40, torch.arange(40) + 40)


@VARIANTS
@KINDS
@pytest.mark.parametrize("hostile", [float("inf"), float("nan"), 0.0, 65504.0])
def test_hostile_factors_stay_in_their_row(variant, kind, hostile):
    backend, k = NativeBackend(variant, 2), 512
    raw = blocks(kind, 20, k)
    at = FACTORS[kind][0]
    broken = raw.copy()
    broken[7, at : at + 2] = torch.tensor([hostile], dtype=torch.float16).view(torch.uint8).numpy()
    weight = filled(backend, broken, kind, k)
    values = unpacked(broken, kind)
    held = weight.rows(torch.arange(20))
    assert torch.equal(held.isnan(), values.isnan())
    assert_bits_equal(held.nan_to_num(1.0), values.nan_to_num(1.0), "unpacked")
    x = torch.randn(30, k)
    for m in (1, 6, 30):
        clean, got = times(backend, filled(backend, raw, kind, k), x[:m]), times(backend, weight, x[:m])
        others = torch.arange(20) != 7
        assert_bits_equal(got[:, others], clean[:, others], "rows beside it")
        assert bool(torch.isfinite(got[:, 7]).all()) == bool(torch.isfinite(values[7]).all())


@VARIANTS
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sum_of_a_block_is_exact(variant, sign):
    """Factors of -128, quants of -32, activations of 15 bits: 32 products add up to 2^31 less one part in a hundred."""
    backend, kind, k = NativeBackend(variant, 2), "q6_k", 256
    raw = blocks(kind, 16, k)
    raw[:] = 0
    at = FACTORS[kind][0]
    raw[:, at - 16 : at] = 128
    raw[:, at : at + 2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8).numpy()
    weight = filled(backend, raw, kind, k)
    assert bool((weight.rows(torch.arange(16)) == 4096).all())
    x = torch.full((30, k), sign)
    for m in (1, 4, 24, 30):
        assert_bits_equal(times(backend, weight, x[:m]), torch.full((m, 16), sign * 4096 * k), f"{m} rows")


@VARIANTS
@pytest.mark.parametrize("rows", [9, 30])
def test_hostile_activations_stay_in_their_row(variant, rows):
    backend, kind, k = NativeBackend(variant, 2), "q5_1", 128
    weight = filled(backend, blocks(kind, 20, k), kind, k)
    x = torch.randn(rows, k)
    clean = times(backend, weight, x)
    for value in (float("inf"), -float("inf"), float("nan")):
        broken = x.clone()
        broken[3, 70] = value
        for m in (4, rows):
            got = times(backend, weight, broken[:m])
            kept = torch.arange(m) != 3
            assert_bits_equal(got[kept], clean[:m][kept], "rows beside it")
            assert not bool(torch.isfinite(got[3]).any())
    tiny = times(backend, weight, torch.full((1, k), 1e-38))
    assert_bits_equal(tiny, torch.zeros_like(tiny), "too small to be rounded")
    large = times(backend, weight, x[:1] * 1e30)
    assert_close(large, clean[:1].double() * 1e30, packed_bound(k), "large rows")


@VARIANTS
def test_the_largest_sums_are_exact(variant):
    """Every quant and activation at its limit: no integer overflows on the way."""
    backend, k = NativeBackend(variant, 1), 256
    for kind in PACKED_TYPES:
        for fill in (0, 127, 128, 255):
            raw = blocks(kind, 16, k)
            each = raw.reshape(16, -1, BY_NAME[kind].nbytes)
            halves = {at + i: each[:, :, at + i].copy() for at in FACTORS[kind] for i in (0, 1)}
            each[:] = fill
            for at, value in halves.items():
                each[:, :, at] = value
            if kind == "q6_k":
                each[:, :, 192:208] = 128  # factors of -128, times quants of -32
            x = torch.full((5, k), 3.0)
            expected = x.double() @ unpacked(raw, kind).double().T
            for m in (1, 5):
                assert_close(times(backend, filled(backend, raw, kind, k), x[:m]), expected[:m], packed_bound(k), kind)


def test_the_reference_runs_on_packed_weights():
    backend = NativeBackend(None, 1)
    weight, x = filled(backend, blocks("q4_k", 40, 256), "q4_k", 256), torch.randn(7, 256)
    out = torch.zeros(7, 40)
    ReferenceBackend(torch.float64).compile([Linear("product", x, weight, out)]).run(step(7))
    assert_close(times(backend, weight, x), out, packed_bound(256), measure=largest_row_error)


def test_bfloat16_weights_take_float32_activations():
    backend, x, values = NativeBackend(None, 1), torch.randn(7, 64), torch.randn(20, 64)
    weight = backend.weight(20, 64, BFLOAT16)
    weight.fill(0, values)
    outs = []
    for source in (x, x.to(torch.bfloat16)):
        out = torch.zeros(7, 20)
        backend.compile([Linear("product", source, weight, out)]).run(step(7))
        outs.append(out)
    assert_bits_equal(outs[0], outs[1], "rounded on the way in")


def test_what_is_refused():
    backend = NativeBackend(None, 1)
    for parts, k, words in (
        ([(8, "q4_0")], 40, "no whole number of q4_0 blocks of 32"),
        ([(8, "q4_k")], 128, "no whole number of q4_k blocks of 256"),
        ([(8, "q2_k")], 256, "not held packed"),
        ([(8, "f16")], 256, "not held packed"),
        ([], 256, "make no weight"),
        ([(0, "q4_0")], 256, "make no weight"),
    ):
        with pytest.raises(KernelError, match=words):
            backend.packed(parts, k)
    with pytest.raises(KernelError, match="make no glu weight"):
        backend.packed([(8, "q4_0"), (6, "q4_0")], 256, glu=True)
    weight = filled(backend, blocks("q4_0", 8, 64), "q4_0", 64)
    with pytest.raises(KernelError, match="not float rows"):
        weight.fill(0, torch.zeros(1, 64))
    with pytest.raises(KernelError, match=r"source is torch\.bfloat16"):
        backend.compile([Linear("product", torch.zeros(1, 64, dtype=torch.bfloat16), weight, torch.zeros(1, 8))])


def test_the_fingerprint_tells_packed_products(monkeypatch):
    backend = NativeBackend(None, 1)
    before = fingerprint(backend)
    assert fingerprint(NativeBackend(None, 2)) == before
    original = PackedWeight.fill_gguf

    def wrong(self, address, ggml_type, count, row_map):
        original(self, address, ggml_type, count, row_map.flip(0) if ggml_type == IDS["q6_k"] else row_map)

    monkeypatch.setattr(PackedWeight, "fill_gguf", wrong)
    assert fingerprint(backend) != before
