"""Every value that the book prints, out of ``kvist learn --all``: to the digit in the text, whole in the results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "chapter.json").read_text())


def digits(values: list[float], form: str = ".9g") -> list[str]:
    return [format(value, form) for value in values]


def result(everything: Any, topic: str) -> Any:
    return everything.findings[topic].result


def test_everything_passed(everything: Any) -> None:
    assert everything.code == 0
    assert all(finding.passed for finding in everything.findings.values())
    assert "FAILED" not in everything.text
    assert everything.text.count("passed: ") == sum(len(f.checks) for f in everything.findings.values()) > 25


@pytest.mark.parametrize(
    "printed",
    [
        *("8,390,656", "2048.5", "73,728", "5.3x", "56.9x", "953.1", "8.4", "5.5", "50.5", "500.5", "5,050", "500,500"),
        *(
            "+0.0429 -0.2115 +0.1646",
            "+0.0398 -0.1019 +0.0901",
            "72 MB",
            "4.0 GB",
            "20.0 GB",
            "2.50 GB",
            "8.38",
            "8.58",
        ),
        *("1,048,576", "5,242,880", "655,360", "7,995,392", "70,272", "32,768", "128 floats", "24 as a latent", "576"),
    ],
)
def test_the_books_digits_are_printed(everything: Any, printed: str) -> None:
    assert re.search(rf"(?<![\d.,]){re.escape(printed)}(?![\d])", everything.text), printed


def test_projection_work(everything: Any) -> None:
    assert result(everything, "work") == GOLDEN["projection_work"]["rows"]


def test_six_tokens(everything: Any) -> None:
    golden, found = GOLDEN["single_head_decode"], result(everything, "six-tokens")
    assert len(found["steps"]) == len(golden["steps"]) == 6
    for step, expected in zip(found["steps"], golden["steps"], strict=True):
        assert [step[name] for name in ("word", "len_before", "len_after")] == [
            expected[name] for name in ("word", "len_before", "len_after")
        ]
        assert digits(step["output"]) == digits(expected["output"])
        line = " ".join(digits(expected["output"], "+.6f"))
        assert line in everything.text
    for name in ("cached_projections", "uncached_projections", "floats_held"):
        assert found[name] == golden[name]


def test_memory(everything: Any) -> None:
    rows = result(everything, "memory")
    assert [(tokens, per_token, shown) for _, _, per_token, tokens, _, shown in rows] == [
        (tokens, per_token, shown) for *_, tokens, per_token, shown in GOLDEN["memory"]["rows"]
    ]
    # The factor of 2 that is only the type is told apart.
    assert "113.8x, of which 2 is the type; at equal type 56.9x" in everything.text


def test_latent(everything: Any) -> None:
    golden, found = GOLDEN["latent"], result(everything, "latent")
    for name in ("c_kv", "K", "V"):
        assert digits(found[name]) == digits(golden[name])
    assert found["toy"] == [golden["floats_per_token_mha"], golden["floats_per_token_latent"], golden["ratio"]]
    assert found["DeepSeek-V3"] == [golden["deepseek_v3"][name] for name in ("mha", "latent", "ratio")]


def test_cached_against_recomputed(everything: Any) -> None:
    for found, expected in zip(result(everything, "equal"), GOLDEN["cached_vs_recomputed"]["rows"], strict=True):
        assert found["pos"] == expected["pos"]
        assert digits(found["cached"]) == digits(expected["cached"])
        assert digits(found["full"]) == digits(expected["full"])


def test_deepseek_both_ways(everything: Any) -> None:
    shown = {
        (tokens, dtype): (f"{mha:.1f}", f"{mla:.2f}") for tokens, dtype, mha, mla in result(everything, "deepseek")
    }
    assert shown[128_000, "float32"][0] == "953.1"
    assert shown[128_000, "float16"][1] == "8.38"
    assert shown[131_072, "float16"][1] == "8.58"
