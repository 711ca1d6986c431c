"""`kvist verify` on both bundled models: the laws hold on real weights, and the command says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvist.base.dtypes import BFLOAT16, FLOAT32
from kvist.cli.main import run
from kvist.kernels.native import variants
from kvist.verify import run as verifying
from kvist.verify.laws import Path, paths
from kvist.verify.report import FirstDifference, LawRow
from kvist.verify.run import FULL, QUICK, Effort, verify

LAWS = {"cached = recomputed", "path independence", "ring = its mask", "by value"}
COMMON = {
    *("nothing kept", "token by token", "chunks of 7", "chunks of 64", "chunks of 256", "changing neighbours (0)"),
    *("blocks of 16", "blocks of 32", "blocks of 128", "blocks of 256", "1 thread", "2 threads", "3 threads"),
    *("truncate and continue", "two processes", "float64 judge"),
}
GOOD = LawRow("path independence", "token by token", 320, True)
BAD = LawRow("path independence", "chunks of 7", 320, False, FirstDifference(7, 3, "attend", 0.25, 49152))
UNEXERCISED = LawRow("path independence", "2 threads", 320, None, detail="not exercised: everything ran in one step")


@pytest.mark.slow
def test_quick_on_smollm2_by_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "smollm2", "--quick", "--json"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    report = json.loads(out)
    assert report["model"] == "smollm2"
    assert int(report["fingerprint"], 16) > 0
    rows = {row["path"]: row for row in report["laws"]}
    assert set(rows) >= COMMON and any("ring" in path for path in rows)
    assert len(rows) == len(report["laws"])
    for row in report["laws"]:
        assert set(row) >= {"name", "path", "positions", "equal", "first_difference"}
        assert row["equal"] is True and row["first_difference"] is None and row["positions"] > 0
        assert row["name"] in LAWS and row["kernels"] == variants()[0] and row["dtype"] == "packed"


@pytest.mark.slow
def test_gemma3_past_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the paths: token by token, a vocabulary of 262,144 takes half a minute."""
    chosen = {"nothing kept", "chunks of 64", "changing neighbours (0)", "blocks of 16", "3 threads", "past the window"}

    def some(*arguments: Any, **settings: Any) -> Iterator[Path]:
        return (path for path in paths(*arguments, **settings) if path.name in chosen or "ring" in path.name)

    monkeypatch.setattr(verifying, "paths", some)
    report = verify("gemma3", Effort(tokens=QUICK.tokens, judged=4))
    assert [row for row in report.laws if not row.holds] == []
    assert {row.path for row in report.laws} > chosen | {"two processes", "float64 judge"}
    assert {row.name for row in report.laws} == LAWS
    assert max(row.positions for row in report.laws) > 512  # the window


@pytest.mark.full
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_everything(model: str) -> None:
    """Every path, variant and type: minutes for SmolLM2, far more for Gemma 3 on portable kernels."""
    report = verify(model, FULL)
    assert [row for row in report.laws if not row.holds] == []
    each = {
        (kernels, dtype): {row.path for row in report.laws if (row.kernels, row.dtype) == (kernels, dtype)}
        for kernels in variants()
        for dtype in ("packed", BFLOAT16.name, FLOAT32.name)
    }
    assert all(found >= COMMON | {"changing neighbours (2)"} for found in each.values())
    if model == "gemma3":
        assert all("past the window" in found for found in each.values())
    assert len(set(report.fingerprint.split("+"))) == len(variants())


@pytest.mark.parametrize(
    ("rows", "code", "words"),
    [
        ([GOOD], 0, ["1 paths, all equal"]),
        ([GOOD, BAD, GOOD], 1, ["DIFFERENT", "3 paths, 1 not", "first at position 7: layer 3, attend", "49152 logits"]),
        ([GOOD, UNEXERCISED], 1, ["NOT EXERCISED", "2 paths, 1 not", "everything ran in one step"]),
        ([], 1, ["0 paths"]),
    ],
)
def test_the_exit_code_is_that_of_the_worst_row(
    rows: list[LawRow], code: int, words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command on a real model, with what was found put in its place."""
    monkeypatch.setattr(verifying, "check_all", lambda *arguments: iter(rows))
    assert run(["verify", "smollm2", "--quick"]) == code
    out = capfd.readouterr().out
    assert [word for word in words if word not in out] == []
    assert run(["verify", "smollm2", "--quick", "--json"]) == code
    found = json.loads(capfd.readouterr().out)["laws"]
    assert [row["equal"] for row in found] == [row.equal for row in rows]
    for row, right in zip(found, rows, strict=True):
        d = right.first_difference
        assert (row["first_difference"] or {}).get("position") == (d.position if d else None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smollm2", "--quick", "--full"], "contradict each other"),
        (["absent.gguf"], "no such model"),
        (["smollm2", "--dtype", "float16"], "float16"),
    ],
)
def test_bad_input(arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("kvist: ") and err.count("\n") == 1
    assert words in err
