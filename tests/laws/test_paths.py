"""Laws 1 and 2 on small random models of every attention kind: every path, type and variant of this machine."""

from __future__ import annotations

import pytest

from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.kernels.fingerprint import fingerprint
from kvist.kernels.native import NativeBackend, variants
from kvist.verify.laws import Laws, paths
from kvist.verify.value import check_value
from random_models import KINDS, random_tokens, subject

LENGTH = 420  # three splits and a part of the fourth


# The best and the plainest always, those between them in the full run.
VARIANTS = [
    pytest.param(name, marks=[] if name in (variants()[0], "portable") else pytest.mark.full) for name in variants()
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=lambda dtype: dtype.name)
def test_every_path_gives_the_same_bits(kind: str, dtype: DType, variant: str) -> None:
    model = subject(kind, dtype, variant)
    laws = Laws(model, random_tokens(LENGTH))
    rows = [laws.check(path) for path in paths(model.spec, LENGTH, full=False)]
    assert [row for row in rows if not row.holds] == []
    usual = {"path independence", "cached = recomputed"}
    assert {row.name for row in rows} == usual | (set() if KINDS[kind].latent else {"ring = its mask"})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_right_by_value(kind: str, variant: str) -> None:
    row = check_value(subject(kind, FLOAT32, variant), random_tokens(300), list(range(0, 300, 7)))
    assert row.holds, row


def test_a_fingerprint_says_how_the_kernels_round() -> None:
    prints = {variant: fingerprint(NativeBackend(variant)) for variant in variants()}
    assert prints == {variant: fingerprint(NativeBackend(variant, 1)) for variant in variants()}
    # Two variants may well round alike (AVX-512 without bfloat16 products and AVX2 do); one without FMA cannot.
    assert len(variants()) == 1 or prints["portable"] != prints[variants()[0]]


def test_a_path_that_did_not_run_fails() -> None:
    model = subject("grouped")
    row = Laws(model, random_tokens(100)).check(next(p for p in paths(model.spec, 100, full=False) if "64" in p.name))
    assert not row.holds
    assert row.equal is None
    assert "not exercised" in row.detail
