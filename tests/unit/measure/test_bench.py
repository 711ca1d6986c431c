"""The command on a real small model, through the engine that ``kvist.load`` makes. No assertion is on speed."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from time import perf_counter

import pytest
import torch

import kvist
from kvist.base.errors import UsageError
from kvist.cli import bench as command
from kvist.cli.main import run
from kvist.kernels.native import variants
from kvist.measure import attention, limits
from kvist.measure import bench as module
from kvist.measure.bench import Effort, bench
from kvist.measure.serving import Prompts, batch, decode, prefill

TINY = Effort(prefills=(64,), depths=(0, 100), seqs=3, seq_depth=48, tokens=4, repeats=2, matrix=False, starts=1)


@pytest.fixture
def small_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Working sets of a megabyte and products of a moment: what is tested is not how fast they are."""
    for room in (limits, attention):
        monkeypatch.setattr(room, "beyond_cache", lambda wanted=0: 1 << 20)
        monkeypatch.setattr(room, "PASS_SECONDS", 1e-4)
    monkeypatch.setattr(attention, "DEPTH", 256)


@pytest.mark.parametrize("kernels", [*variants()[:1], pytest.param("reference", marks=pytest.mark.full)])
def test_report_of_a_small_model(
    folder: Path, small_sets: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: str
) -> None:
    monkeypatch.setenv("KVIST_KERNELS", kernels)
    told: list[str] = []
    threads = torch.get_num_threads()
    report = bench(str(folder), replace(TINY, prefills=(64, 4096)), announce=told.append)
    assert report.weights == "float32"
    found = json.loads(json.dumps(report.json()))
    assert {"read_gbps", "prefill", "decode", "batch", "attention", "peak_rss_bytes", "fingerprint"} <= set(found)
    assert [row["tokens"] for row in found["prefill"]] == [64]
    assert [row["depth"] for row in found["decode"]] == [0, 100]
    shape = [(row["requests"], row["depth"], row["shared_prefix"]) for row in found["batch"]]
    assert shape == [(3, 48, 0), (3, 48, 48)]
    assert any("prefill of 4096" in reason for reason in found["left_out"])
    rates = [*found["prefill"], *found["decode"], *found["batch"]]
    for row in rates:
        assert 0 < row["min"] <= row["tok_s"] <= row["max"] and row["repeats"] == 2
        assert row["limit"] > 0 and row["of_limit"] == pytest.approx(row["tok_s"] / row["limit"])
    if kernels == "reference":
        assert found["attention"] == []
    else:
        (row,) = found["attention"]
        assert (row["kv_dtype"], row["heads"], row["kv_heads"], row["head_dim"]) == ("float32", 6, 2, 16)
        assert row["gbps"] > 0 and row["depth"] == 256
    assert found["peak_rss_bytes"] > 50e6 and len(found["fingerprint"]) == 16
    assert found["startup"]["seconds"] > 0
    assert torch.get_num_threads() == threads
    assert any("decode at depth 100" in text for text in told)
    text = command.table(report)
    assert (
        "weights float32, " in text
        and "decode at depth 100" in text
        and "3 requests at 48, one prefix" in text
        and "left out: prefill" in text
    )


@pytest.mark.skipif(not variants(), reason="the reference kernels hold weights in float32 only")
@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_weights_are_held_as_asked_and_a_batch_has_room(folder: Path, weights: str) -> None:
    effort = replace(TINY, prefills=(64,), depths=(0,), seqs=4, seq_depth=200)
    work = module._Bench(str(folder), weights, effort, lambda text: None, perf_counter)
    llm = work._load()
    assert llm.setup is not None and (llm.setup.weights, llm.setup.kv_cache_dtype) == (weights, weights)
    assert list(work._serve(llm)[2]) == [0, 200]


def test_the_pool_holds_a_batch_of_a_model_with_windows(windows: Path) -> None:
    effort = replace(TINY, prefills=(64,), depths=(0,), seqs=4, seq_depth=700, tokens=2)
    work = module._Bench(str(windows), "auto", effort, lambda text: None, perf_counter)
    llm = work._load()
    prefills, decodes, batches = work._serve(llm)
    assert work.left_out == [] and list(prefills) == [64] and list(decodes) == [0]
    for shared in (0, 700):
        assert [window.tokens for window in batches[shared].windows] == [4 * 2] * 2
    assert llm.engine.idle


def test_every_request_of_a_batch_advances_in_every_window(folder: Path) -> None:
    llm = kvist.load(folder, ctx_size=256, memory=1 << 24)
    prompts = Prompts(llm, 64)
    for shared in (False, True):
        with closing(batch(llm, prompts, 4, 48, 5, perf_counter, shared=shared, most=60)) as windows:
            found = list(islice(windows, 3))
        assert [window.tokens for window in found] == [4 * 5] * 3
        assert llm.engine.idle
        # Depth grows by what was decoded: five tokens a window.
        assert [b.depth - a.depth for a, b in pairwise(found)] == [5.0, 5.0]


def test_decode_counts_keys_from_the_prompt_on(folder: Path) -> None:
    llm = kvist.load(folder, ctx_size=256)
    with closing(decode(llm, Prompts(llm, 64), 100, 4, perf_counter)) as windows:
        first = next(windows)
    # Prompt and first token are there: the four steps see 101, 102, 103 and 104 keys.
    assert (first.tokens, first.depth) == (4, 102.5)
    assert llm.engine.idle


def test_windows_end_with_the_context(folder: Path) -> None:
    llm = kvist.load(folder, ctx_size=64)
    found = list(decode(llm, Prompts(llm, 64), 50, 4, perf_counter))
    assert 1 <= len(found) <= 3 and llm.engine.idle


def test_prefill_puts_the_whole_prompt_through_the_layers(folder: Path) -> None:
    llm = kvist.load(folder, ctx_size=256)
    prompts = Prompts(llm, 128)
    for _ in range(3):
        before = llm.engine.metrics.projections
        prefill(llm, prompts, 128, perf_counter)
        assert llm.engine.metrics.projections - before == 128


def test_prompts_never_begin_alike(folder: Path) -> None:
    prompts = Prompts(kvist.load(folder, ctx_size=256), 64)
    heads = {tuple(prompts.take(32)[:16]) for _ in range(200)}
    assert len(heads) == 200


def test_command_prints_one_object(
    folder: Path, small_sets: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "QUICK", replace(TINY, depths=(0,), repeats=1))
    picture = tmp_path / "speed.svg"
    arguments = ["bench", str(folder), "--quick", "--json"]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        drawn = False
    else:
        drawn = True
        arguments += ["--plot", str(picture)]
    assert run(arguments) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["decode"][0]["depth"] == 0
    assert "bench: start-up" in err
    assert picture.exists() == drawn
    if drawn:
        assert "measured" in picture.read_text() or "<path" in picture.read_text()


@pytest.mark.parametrize(("path", "words"), [("speed.txt", "must end in"), ("nowhere/speed.png", "there is no folder")])
def test_a_picture_that_cannot_be_is_refused_at_once(
    folder: Path, tmp_path: Path, path: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert run(["bench", str(folder), "--plot", str(tmp_path / path)]) == 2
    assert words in capsys.readouterr().err


def test_a_model_that_cannot_start_says_why(tmp_path: Path) -> None:
    from kvist.measure.startup import measure_startup

    with pytest.raises(UsageError, match="did not start"):
        measure_startup(str(tmp_path / "nothing"), "auto", perf_counter, 1)
