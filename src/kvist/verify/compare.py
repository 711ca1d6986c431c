"""Comparisons, and every tolerance of the project with its reason.

Bits are compared through integer views: as floats, 0.0 equals -0.0 and NaN differs from itself. Values are compared by
the norm of the difference over the norm of what is expected, in float64. A NaN that is not expected is never within a
tolerance, and neither is one on both sides: a value comparison of NaN is refused, because it proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.base.errors import VerifyError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The largest relative error of one rounding: 2^-p for p bits of precision, the hidden one included.
FLOAT32_UNIT = 2.0**-24
BFLOAT16_UNIT = 2.0**-8
FLOAT16_UNIT = 2.0**-11

# Whole models, relative norm of all logits against the expected ones.
LOGITS = 1e-4  # float32 against another float32 implementation: orders of summation differ in every layer
PATHS = 1e-5  # float32, the same implementation on another path (chunks, batches) where bits are not promised
JUDGE = 1e-9  # two float64 implementations: some 1e7 roundings of 1e-16, amplified by a few layers
# bfloat16 against float32, mean nats per position. Measured on SmolLM2: 1.4e-4 with a float32 residual stream and only
# product inputs rounded, 1.2e-3 with everything in bfloat16; in between lies what may not happen unnoticed.
KL_BFLOAT16 = 3e-4

# Packed weights: what enters a product keeps 15 bits, so what is left is the rounding of keys, values and probabilities
# to bfloat16.
KL_PACKED = 1e-4
# The same with a float32 cache: the 15 bits alone. Measured 2.9e-7 on SmolLM2 (Q4_1) and 1.6e-7 on Gemma 3 (Q4_K_M).
KL_PACKED_PRODUCTS = 2e-6
# A block of 32 activations is rounded in steps of 1/16256 of its largest; at worst one element makes up its norm, and
# then each of the others is off by half a step: sqrt(32) / 2 / 16256 of it.
PACKED_ROUNDING = math.sqrt(32) / 2 / 16256

# A router's choice between two experts: how far apart their scores may lie, as a share of the spread of all scores,
# where a rounded stream has taken the other one. bfloat16: some 2^-8 from each layer before, which grows as logits do.
CHOICE = 1e-4  # float32 throughout
CHOICE_ROUNDED = 0.05

# One float32 operation, relative norm against float64 on the same inputs.
POINTWISE = 1e-6  # norms, rotation, gates, embedding: a dozen roundings, exp and tanh within a few ulp
ATTEND = 4e-6  # two products of up to a few hundred terms, one exp within 2 ulp, one fold per split
# Probabilities rounded to bfloat16 are each off by up to 2^-8, independently of each other: over random scores that is
# 1.4e-3 of the output's norm (measured); what is allowed is the whole unit.
ATTEND_BFLOAT16 = BFLOAT16_UNIT


def linear_bound(k: int) -> float:
    """Bound of a product over ``k`` terms with float32 accumulation, against float64 on the same (rounded) inputs.

    One chain of k additions leaves about unit * sqrt(k) / 2 of the result's norm; four times that is allowed.
    """
    return 2 * FLOAT32_UNIT * math.sqrt(max(k, 1)) + POINTWISE


def packed_bound(k: int) -> float:
    """Bound of a product over ``k`` terms with packed weights, against float64 on the unpacked weights."""
    return linear_bound(k) + PACKED_ROUNDING


def attend_bound(store_dtype: str, largest_score: float = 0.0) -> float:
    """Bound of attention over a store of type ``store_dtype``, against float64 on the K and V as stored.

    A score of size s carries an error of a few units of s, which the exponential turns into a relative error: pass the
    largest absolute score where it exceeds ten or so.
    """
    base = ATTEND_BFLOAT16 if store_dtype == "bfloat16" else ATTEND
    return base + 4 * FLOAT32_UNIT * largest_score


def rounding_bound(dtype: str) -> float:
    """Relative norm error of rounding once to ``dtype`` after a float32 computation."""
    units = {"float32": FLOAT32_UNIT, "bfloat16": BFLOAT16_UNIT, "float16": FLOAT16_UNIT, "float64": 2.0**-53}
    if dtype not in units:
        raise VerifyError(f"no rounding bound for type {dtype!r}: known are {', '.join(units)}")
    return units[dtype] + POINTWISE


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two tensors differ, in row-major order, and by how much everything differs."""

    index: tuple[int, ...]
    actual: float
    expected: float
    count: int
    largest: float  # absolute, over all elements; NaN when a NaN takes part

    def __str__(self) -> str:
        """One line for a report."""
        return (
            f"first at {list(self.index)}: {self.actual!r} instead of {self.expected!r}; "
            f"{self.count} elements differ, by up to {self.largest:.3g}"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcome of a comparison by value. ``error`` is NaN when a NaN made the comparison worthless."""

    ok: bool
    error: float
    bound: float
    reason: str


def bits_equal(actual: Tensor, expected: Tensor) -> bool:
    """Whether both have the same type, shape and bits (-0.0 differs from 0.0, a NaN equals its own bits)."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    return torch.equal(as_integers(actual), as_integers(expected))


def first_difference(actual: Tensor, expected: Tensor) -> Difference | None:
    """Where the bits first differ; None when they are equal. Raises VerifyError when type or shape differ."""
    _require_alike(actual, expected)
    if actual.dtype != expected.dtype:
        raise VerifyError(f"bits of {actual.dtype} and {expected.dtype} cannot be compared: compare values instead")
    return _difference(actual, expected, as_integers(actual) != as_integers(expected))


def as_integers(x: Tensor) -> Tensor:
    """The bits of ``x`` as integers of the same width and shape."""
    if not x.dtype.is_floating_point:
        return x
    if x.element_size() not in _INTEGERS:
        raise VerifyError(f"elements of {x.element_size()} bytes have no integer view")
    return x.contiguous().view(_INTEGERS[x.element_size()])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of ``expected``, in float64; 0/0 is 0, x/0 is infinite.

    Raises VerifyError when shapes differ, or when a NaN or an infinity takes part: neither has a distance.
    """
    _require_alike(actual, expected)
    a, e = actual.detach().double(), expected.detach().double()
    for name, x in (("actual", a), ("expected", e)):
        if not bool(torch.isfinite(x).all()):
            index = tuple(int(i) for i in torch.nonzero(~torch.isfinite(x))[0])
            raise VerifyError(f"{name} value at {list(index)} is {float(x[index])}: there is no distance to it")
    difference, size = float(torch.linalg.vector_norm(a - e)), float(torch.linalg.vector_norm(e))
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / size


def largest_row_error(actual: Tensor, expected: Tensor) -> float:
    """The largest relative norm error of any row (last axis): one wrong row among many cannot hide in it."""
    _require_alike(actual, expected)
    relative_error(actual, expected)  # refuses what is not finite
    if actual.numel() == 0:
        return 0.0
    a, e = actual.detach().double(), expected.detach().double()
    difference, size = torch.linalg.vector_norm(a - e, dim=-1), torch.linalg.vector_norm(e, dim=-1)
    ratio = torch.where(difference == 0, 0.0, difference / size)
    return float(ratio.max())


def close(
    actual: Tensor, expected: Tensor, bound: float, measure: Callable[[Tensor, Tensor], float] = relative_error
) -> Comparison:
    """Compare by value against ``bound``; what cannot be compared (NaN, infinity, another shape) is not close."""
    try:
        error = measure(actual, expected)
    except VerifyError as refusal:
        return Comparison(False, math.nan, bound, str(refusal))
    if error <= bound:
        return Comparison(True, error, bound, f"error {error:.3g} within {bound:.3g}")
    off = (actual.detach().double() - expected.detach().double()).abs()
    where = _difference(actual, expected, off > bound * expected.detach().double().abs().amax())
    return Comparison(False, error, bound, f"error {error:.3g} exceeds {bound:.3g}" + (f": {where}" if where else ""))


def assert_close(
    actual: Tensor,
    expected: Tensor,
    bound: float,
    what: str = "values",
    measure: Callable[[Tensor, Tensor], float] = relative_error,
) -> None:
    """Raise AssertionError with the error, the bound and the first place that is off."""
    result = close(actual, expected, bound, measure)
    if not result.ok:
        raise AssertionError(f"{what}: {result.reason}")


def assert_bits_equal(actual: Tensor, expected: Tensor, what: str = "values") -> None:
    """Raise AssertionError with the first place where the bits differ."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{what}: {actual.dtype} {list(actual.shape)} is not {expected.dtype} {list(expected.shape)}"
        )
    difference = first_difference(actual, expected)
    if difference is not None:
        raise AssertionError(f"{what}: {difference}")


def kl_divergence(logits: Tensor, reference_logits: Tensor) -> float:
    """Mean over positions of KL(reference || other) in nats, of logits [T, vocab], in float64.

    Raises VerifyError when shapes differ, there is no position, or a value is NaN or infinite.
    """
    if logits.dim() != 2 or logits.shape[0] == 0:
        raise VerifyError(f"a mean over positions needs logits [T, vocab] with T >= 1, not {list(logits.shape)}")
    relative_error(logits, reference_logits)  # refuses what is not finite or of another shape
    total = 0.0
    for row, reference in zip(logits.detach(), reference_logits.detach(), strict=True):  # by row: a vocabulary is large
        q = torch.log_softmax(row.double(), -1)
        p = torch.log_softmax(reference.double(), -1)
        total += float((p.exp() * (p - q)).sum())
    return total / len(logits)


def _require_alike(actual: Tensor, expected: Tensor) -> None:
    """Raise VerifyError when the shapes differ: broadcasting would compare something else."""
    if actual.shape != expected.shape:
        raise VerifyError(f"shapes {list(actual.shape)} and {list(expected.shape)} differ: nothing to compare")


def _difference(actual: Tensor, expected: Tensor, differs: Tensor) -> Difference | None:
    """The first true element of ``differs`` described; None when there is none."""
    count = int(differs.sum())
    if count == 0:
        return None
    flat = int(torch.nonzero(differs.flatten())[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), differs.shape)) if differs.dim() else ()
    a, e = actual.detach().double(), expected.detach().double()
    # Equal infinities differ by nothing, not by NaN.
    largest = float(torch.where(a == e, 0.0, (a - e).abs()).max())
    return Difference(index, float(a[index]), float(e[index]), count, largest)
