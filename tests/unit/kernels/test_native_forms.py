"""Layer norms, feed forwards without a gate, scales and learned positions on every kernel variant, by value and by row.

Widths that fill no vector, rows that stand alone or among many: a row's bits depend on that row alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.base.errors import KernelError
from kvist.kernels.native import NativeBackend, variants
from kvist.kernels.ops import Backend, Embed, Linear, NormAdd, Normalise, NormWeight, Op, Step, torch_dtype
from kvist.kernels.reference import ReferenceBackend
from kvist.verify.compare import LOGITS, assert_bits_equal, assert_close, largest_row_error

ROWS, K, N = 21, 46, 37  # rows of more than one tile; widths that fill no vector
BACKENDS = [*(NativeBackend(variant, 2) for variant in variants()), ReferenceBackend()]
JUDGE = ReferenceBackend(torch.float64)
DTYPES = (FLOAT32, BFLOAT16)


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm(width: int, centred: bool, bias: bool) -> NormWeight:
    return NormWeight(1 + 0.3 * values(1, width), 1e-5, 0.5 * values(2, width) if bias else None, centred)


def step(rows: int, first: int = 0) -> Step:
    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    return Step(
        torch.arange(rows, dtype=torch.int32) % N,
        torch.arange(first, first + rows, dtype=torch.int32),
        ints(0, rows),
        (),
        ints(),
    )


def run(backend: Backend, op: Op, rows: int, first: int = 0) -> torch.Tensor:
    backend.compile([op]).run(step(rows, first))
    return op.out[:rows].double()  # type: ignore[union-attr]


def linear(backend: Backend, dtype: DType, source: torch.Tensor, **settings: Any) -> Linear:
    weight = backend.weight(N, K, dtype)
    weight.fill(0, values(3, N, K) / K**0.5)
    rounded = settings.get("epilogue") == "act"
    kind = torch.float64 if backend is JUDGE else torch_dtype(dtype) if rounded else torch.float32
    out = torch.zeros(ROWS, N, dtype=kind)
    return Linear("probe", source, weight, out, **settings)


def allowed(dtype: DType) -> float:
    return LOGITS if dtype == FLOAT32 else 2e-2  # inputs and outputs of a bfloat16 product are rounded at 2^-8


FORMS: dict[str, dict[str, Any]] = {
    "layer norm": {"norm": norm(K, True, True)},
    "layer norm without bias": {"norm": norm(K, True, False)},
    "no norm": {},
    "gelu": {"epilogue": "act", "activation": "gelu", "bias": values(4, N)},
    "gelu_tanh": {"epilogue": "act", "activation": "gelu_tanh", "norm": norm(K, True, True)},
    "silu": {"epilogue": "act", "activation": "silu", "norm": norm(K, False, False)},
    "scale": {"scale": 0.4, "bias": values(4, N)},
    "scale and cap": {"scale": 3.0, "softcap": 2.0, "norm": norm(K, False, False)},
    "add scaled": {"scale": 0.25, "epilogue": "add"},
}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("form", FORMS)
def test_linear_layers(backend: Backend, dtype: DType, form: str) -> None:
    """From a float32 source, rounded on the way in; large and shifted, so that a mean left in would show."""
    source = 3 * values(5, ROWS, K) + 20
    right = run(JUDGE, linear(JUDGE, dtype, source, **FORMS[form]), ROWS)
    found = run(backend, linear(backend, dtype, source, **FORMS[form]), ROWS)
    assert_close(found, right, allowed(dtype), form, largest_row_error)
    if backend.name.startswith("native"):
        for row in (0, 13, ROWS - 1):
            alone = run(backend, linear(backend, dtype, source[row : row + 1], **FORMS[form]), 1)
            assert_bits_equal(alone[0], found[row], f"row {row} alone")


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("centred", [True, False])
def test_norms_of_rows(backend: Backend, centred: bool) -> None:
    """Added, and in place over a part of wider rows."""
    source, weight = 3 * values(6, ROWS, K) + 100, norm(K, centred, centred)
    start = values(7, ROWS, K)
    right = run(JUDGE, NormAdd("probe", source.double(), weight, start.double()), ROWS)
    found = run(backend, NormAdd("probe", source, weight, start.clone()), ROWS)
    assert_close(found, right, LOGITS, "added", largest_row_error)
    wide = torch.cat((source, source + 1), -1)
    part = wide[:, :K]
    assert_close(run(backend, Normalise("probe", part, weight, part), ROWS), right - start, LOGITS, "in place")
    assert_bits_equal(wide[:, K:], source + 1, "the rest of the row stays")


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_learned_positions(backend: Backend, dtype: DType) -> None:
    weight, places = backend.weight(N, K, dtype), backend.weight(30, K, dtype)
    weight.fill(0, values(8, N, K))
    places.fill(0, values(9, 30, K))
    found = run(backend, Embed("probe", weight, 2.0, torch.zeros(ROWS, K), places), ROWS, first=7)
    tokens = torch.arange(ROWS) % N
    right = 2.0 * weight.rows(tokens) + places.rows(torch.arange(7, 7 + ROWS))
    assert_bits_equal(found, right.double(), "embedding")
    if backend.name.startswith("native"):
        with pytest.raises(KernelError, match="position 30 of 30 learned ones"):
            run(backend, Embed("probe", weight, 2.0, torch.zeros(ROWS, K), places), ROWS, first=10)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_erf_far_out(backend: Backend) -> None:
    """gelu over its whole range: x where erf is 1, 0 where it is -1, NaN and infinities as they come."""
    x = torch.tensor([[-1e30, -20.0, -6.0, -4.0, -1.0, -0.99, -1e-20, 0.0, 1e-20, 0.99, 1.0, 4.0, 6.0, 20.0, 1e30]])
    width = x.shape[1]
    weight = backend.weight(width, width, FLOAT32)
    weight.fill(0, torch.eye(width))
    out = torch.zeros(1, width)
    found = run(backend, Linear("probe", x, weight, out, epilogue="act", activation="gelu"), 1)
    right = torch.nn.functional.gelu(x.double())
    assert bool(((found - right).abs() <= 1e-6 * torch.maximum(x.abs().double(), torch.ones(()))).all()), found - right
    assert found[0, -1] == x[0, -1] and found[0, 0] == 0 and found[0, 7] == 0


def test_norms_of_queries_that_kernels_do_not_know() -> None:
    from kvist.kernels.ops import Append, LayerStore

    store = LayerStore(torch.zeros(1, 16 * 32 * 4, dtype=torch.uint8), FLOAT32, 16, 1, 16, 16, 0)
    op = Append("probe", torch.zeros(1, 48), torch.zeros(1, 16), store, 1, 1.0, q_norm=norm(16, True, True))
    reason = NativeBackend().refuses(op)
    assert reason is not None and "by rms only" in reason
