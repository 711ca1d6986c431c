"""``kvist verify`` on a folder with latents and experts, as a user runs it: every row, in both types."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hf_models
import letters
from family_configs import CONFIGS
from kvist.verify.run import QUICK, verify

pytestmark = pytest.mark.slow


CASES = [
    ("deepseek_v3", "bfloat16"),
    ("minicpm3", "float32"),
    pytest.param("deepseek_v3", "float32", marks=pytest.mark.full),
    pytest.param("deepseek_v2 groups", "bfloat16", marks=pytest.mark.full),
    pytest.param("qwen3_moe", "bfloat16", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_every_row_holds(tmp_path: Path, kind: str, dtype: str) -> None:
    torch.manual_seed(2)
    hf_models.model_of(CONFIGS[kind]()).save_pretrained(tmp_path)
    report = verify(str(letters.save(tmp_path)), QUICK, dtype=dtype)
    assert report.holds, [row for row in report.laws if not row.holds]
    names = {row.path for row in report.laws}
    assert {"token by token", "changing neighbours (0)", "shared beginning", "truncate and continue"} <= names
    assert {"two processes", "float64 judge"} <= names
    assert any("ring" in name for name in names) == kind.startswith("qwen3")
