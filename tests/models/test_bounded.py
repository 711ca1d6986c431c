"""--kv-window and --kv-sinks: bounded memory, defined by its mask, held against the float64 judge and itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvist
import letters
from family_configs import CONFIGS, random_model
from kvist.base.dtypes import FLOAT32
from kvist.base.errors import TooLong, UsageError
from kvist.cache.check import check
from kvist.cli.summary import as_lines, as_object, cache_facts, totals
from kvist.compose import LLM
from kvist.compose.wiring import open_model
from kvist.kernels.native import NativeBackend
from kvist.model.weights import load_weights
from kvist.spec.model import Attention
from kvist.spec.source import resolve
from kvist.verify.compare import LOGITS, assert_bits_equal, assert_close, largest_row_error
from kvist.verify.course import Subject
from kvist.verify.judge import judge_logits
from kvist.verify.value import held_weights
from probing import all_logits

WINDOW, SINKS = 48, 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bounded")
    made = {}
    for kind in ("qwen3", "gemma2", "gpt2"):
        random_model(CONFIGS[kind]()).save_pretrained(root / kind)
        made[kind] = letters.save(root / kind)
    return made


def load(folder: Path, **settings: Any) -> LLM:
    settings = {"ctx_size": 512, "max_num_seqs": 2, "block_size": 16, "kv_window": WINDOW, "kv_sinks": SINKS} | settings
    return kvist.load(folder, **settings)


def tokens(count: int) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("sinks", [0, SINKS, 20])
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_it_is_its_mask(folders: dict[str, Path], kind: str, sinks: int) -> None:
    """Against the judge, which has a dense mask and no cache; layers with a smaller window of their own keep it."""
    llm = load(folders[kind], kv_sinks=sinks)
    assert llm.setup is not None
    windows = [
        (a.window, a.sinks) for a in (layer.attention for layer in llm.setup.spec.layers) if isinstance(a, Attention)
    ]
    assert windows == ([(WINDOW, sinks)] * 3 if kind == "qwen3" else [(40, 0), (WINDOW, sinks), (40, 0)])
    _, checkpoint, _ = open_model(resolve(str(folders[kind])))
    backend = NativeBackend()
    weights = load_weights(llm.setup.spec, checkpoint, backend, FLOAT32)
    subject = Subject(kind, llm.setup.spec, weights, FLOAT32, lambda count: backend)
    right = judge_logits(llm.setup.spec, held_weights(subject), tokens(300))
    whole = all_logits(llm, tokens(300), 300)
    assert_close(whole, right, LOGITS, kind, largest_row_error)
    for chunk in (1, 33, 100):
        assert_bits_equal(all_logits(llm, tokens(300), chunk), whole, f"chunks of {chunk}")
    free = load(folders[kind], kv_window=None, kv_sinks=None)
    full = all_logits(free, tokens(300), 300)
    assert_bits_equal(full[:40], whole[:40], "as long as nothing fell out of a window, nothing differs")
    assert largest_row_error(whole, full) > 100 * LOGITS


def test_memory_is_flat_whatever_the_length(folders: dict[str, Path]) -> None:
    short, long = (load(folders["qwen3"], ctx_size=ctx, max_num_seqs=1) for ctx in (1024, 4096))
    assert short.setup is not None and long.setup is not None
    assert short.setup.cache_bytes == long.setup.cache_bytes
    ring = long.engine.groups[0].ring  # the sinks, the window, and room for one step
    assert ring is not None and long.engine.pools[0].num_blocks == ring.num_blocks
    most = 0
    with long.stream(tokens(700), max_tokens=1500, ignore_eos=True) as stream:
        for _ in stream:
            most = max(most, long.engine.pools[0].num_used)
        done = stream.completion
    assert done.generated_tokens == 1500 and most == ring.num_blocks
    check(long.engine.groups, long.engine.pools, long.engine.tables)
    # Beyond the 512 positions that the model was made for, positions stay absolute: a chunk in the middle agrees.
    ids = [*tokens(700), *done.ids[:-1]]
    logits = all_logits(load(folders["qwen3"], ctx_size=4096), ids, 64)
    assert tuple(logits[699:].argmax(-1).tolist()) == done.ids


def test_seen_and_kept_are_two_numbers(folders: dict[str, Path]) -> None:
    llm = load(folders["qwen3"])
    one = llm.generate([tokens(100)], max_tokens=21, ignore_eos=True)
    run, facts = totals(one), cache_facts(llm)
    held = as_object(run, facts)["cache"]
    assert (held["tokens_seen"], held["rows_kept"]) == (120, WINDOW + SINKS)
    assert (held["kv_window"], held["kv_sinks"]) == (WINDOW, SINKS)
    lines = "\n".join(as_lines(run, facts))
    assert "120 tokens seen, 53 rows kept: the first 5 and the newest 48; another function than full attention" in lines
    few = totals(llm.generate([tokens(10)], max_tokens=3, ignore_eos=True))
    assert as_object(few, facts)["cache"]["rows_kept"] == 12
    plain = load(folders["qwen3"], kv_window=None, kv_sinks=None)
    held = as_object(totals(plain.generate([tokens(100)], max_tokens=21, ignore_eos=True)), cache_facts(plain))["cache"]
    assert (held["tokens_seen"], held["rows_kept"]) == (120, 120) and "kv_window" not in held


def test_nothing_kept_is_the_same_function(folders: dict[str, Path]) -> None:
    """--no-cache recomputes every token under the same mask."""
    kept = load(folders["qwen3"]).generate([tokens(90)], max_tokens=20, ignore_eos=True)[0]
    none = load(folders["qwen3"], cache=False).generate([tokens(90)], max_tokens=20, ignore_eos=True)[0]
    assert kept.ids == none.ids and none.projections > kept.projections


def test_refusals(folders: dict[str, Path]) -> None:
    for settings, words in (
        ({"kv_window": 0}, "a window of 0 keys sees nothing"),
        ({"kv_sinks": -1}, "-1 sinks"),
        ({"kv_window": None}, "kv_sinks is 5 without kv_window"),
        ({"ctx_size": 1 << 30}, "ctx_size is"),
    ):
        with pytest.raises(UsageError, match=words):
            load(folders["qwen3"], **settings)
    with pytest.raises(UsageError, match="made for 1 to 512 positions"):
        load(folders["gpt2"], ctx_size=513)  # learned positions end where they end
    with pytest.raises(TooLong):
        load(folders["qwen3"]).generate([tokens(513)], max_tokens=1)


def test_the_command(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from kvist.cli.main import app

    common = ["run", str(folders["qwen3"]), "--no-chat-template", "--kv-window", "32", "--kv-sinks", "2", "-n", "40"]
    done = CliRunner().invoke(app, [*common, "--block-size", "16", "--json", "abcdefghij" * 6])
    assert done.exit_code == 0, done.output
    held = json.loads(done.stdout)["cache"]
    assert held["rows_kept"] == 34 and held["tokens_seen"] > 60
