"""Comparisons say no when they should: signs of zero, NaN, shapes, one wrong row, and where."""

from __future__ import annotations

import math

import pytest
import torch

from kvist.base.errors import VerifyError
from kvist.verify.compare import (
    KL_BFLOAT16,
    PATHS,
    assert_bits_equal,
    assert_close,
    bits_equal,
    close,
    first_difference,
    kl_divergence,
    largest_row_error,
    linear_bound,
    relative_error,
    rounding_bound,
)

NAN = math.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_bits_equal_themselves_and_differ_by_one(dtype):
    x = torch.arange(12).reshape(3, 4).to(dtype)
    assert bits_equal(x, x.clone()) and bits_equal(x.T, x.T.clone())
    assert first_difference(x, x.clone()) is None
    y = x.clone()
    y[2, 1] += 1
    assert not bits_equal(y, x)
    difference = first_difference(y, x)
    assert (difference.index, difference.actual, difference.expected, difference.count) == ((2, 1), 10, 9, 1)
    assert difference.largest == 1
    with pytest.raises(AssertionError, match=r"logits: first at \[2, 1\]: 10\.0 instead of 9\.0"):
        assert_bits_equal(y, x, "logits")


def test_bits_see_what_floats_do_not():
    zero, nan = torch.tensor([0.0, 1.0]), torch.tensor([NAN, 1.0])
    assert torch.equal(zero, -zero * torch.tensor([1.0, -1.0]))  # the trap
    assert not bits_equal(zero, torch.tensor([-0.0, 1.0]))
    assert first_difference(zero, torch.tensor([-0.0, 1.0])).index == (0,)
    assert bits_equal(nan, nan.clone())
    assert first_difference(nan, nan.clone()) is None
    payload = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert not bits_equal(nan, payload)
    ulp = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert not bits_equal(torch.tensor(1.0), ulp)
    assert first_difference(torch.tensor(1.0), ulp).index == ()


def test_other_types_and_shapes_are_not_equal():
    x = torch.zeros(2, 3)
    assert not bits_equal(x, x.double()) and not bits_equal(x, x.T) and not bits_equal(x, torch.zeros(1, 3))
    for other in (torch.zeros(3), torch.zeros(1, 3)):  # would broadcast
        with pytest.raises(VerifyError, match="differ"):
            relative_error(x, other)
        with pytest.raises(VerifyError, match="differ"):
            first_difference(x, other)
        assert not close(x, other, bound=1.0).ok
    with pytest.raises(VerifyError, match="float64"):
        first_difference(x, x.double())
    with pytest.raises(AssertionError, match="float64"):
        assert_bits_equal(x, x.double())


def test_relative_error_is_a_ratio_of_norms():
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    actual = expected + torch.tensor([[0.0, 0.0], [0.3, 0.4]])
    assert relative_error(actual, expected) == pytest.approx(0.1)
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_error(torch.ones(3), torch.zeros(3)) == math.inf
    assert relative_error(torch.empty(0), torch.empty(0)) == 0
    assert largest_row_error(torch.empty(0, 4), torch.empty(0, 4)) == 0


def test_one_wrong_row_among_many():
    expected = torch.ones(10000, 4)
    actual = expected.clone()
    actual[77] *= 1.01
    assert relative_error(actual, expected) < 2e-4
    assert largest_row_error(actual, expected) == pytest.approx(0.01, rel=1e-4)
    with pytest.raises(AssertionError, match=r"first at \[77, 0\]"):
        assert_close(actual, expected, 1e-3, measure=largest_row_error)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_what_has_no_distance_is_refused_on_either_side_and_on_both(bad):
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    y[1, 2] = bad
    for a, b in ((x, y), (y, x), (y, y)):
        with pytest.raises(VerifyError, match=r"\[1, 2\]"):
            relative_error(a, b)
        assert not close(a, b, math.inf).ok
        with pytest.raises(VerifyError):
            largest_row_error(a, b)
        with pytest.raises(VerifyError):
            kl_divergence(a, b)
        with pytest.raises(AssertionError, match=r"out: .*\[1, 2\]"):
            assert_close(a, b, math.inf, "out")


def test_close_reports_error_bound_and_place():
    expected = torch.ones(4, 4)
    actual = expected.clone()
    actual[3, 1] = 1.5
    result = close(actual, expected, PATHS)
    assert (result.ok, result.error, result.bound) == (False, 0.125, PATHS)
    assert "error 0.125 exceeds 1e-05: first at [3, 1]: 1.5 instead of 1.0" in result.reason
    assert close(expected, expected, 0.0).ok


def test_kl_divergence_of_known_distributions():
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    # Logits are known up to a constant per row, and the direction counts.
    assert kl_divergence(q.log() + 3, p.log()) == pytest.approx(by_hand / 2)
    assert kl_divergence(p.log(), q.log()) != pytest.approx(by_hand / 2)
    assert kl_divergence(p.log(), p.log() - 5) == pytest.approx(0, abs=1e-15)
    with pytest.raises(VerifyError, match="T >= 1"):
        kl_divergence(torch.empty(0, 5), torch.empty(0, 5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounding_once_stays_within_its_bound_and_twice_the_error_does_not(dtype):
    x = torch.linspace(1, 2, 4097, dtype=torch.float64)
    bound = rounding_bound(dtype)
    rounded = x.to(getattr(torch, dtype)).double()
    assert ((rounded - x).abs() / x).max() <= bound
    if dtype != "float32":
        assert ((rounded - x).abs() / x).max() > bound / 2.5
    with pytest.raises(VerifyError, match="int8"):
        rounding_bound("int8")


def test_bounds_are_what_the_documents_promise():
    assert KL_BFLOAT16 == 3e-4
    assert linear_bound(576) < linear_bound(9216) < 2e-5
