"""--kv-cache-dtype, --block-size, --threads and a bounded window, in every combination.

Block size and threads change no bit; a type and a window each make a function of their own. What cannot be is refused
in one line with the value, what is allowed, and what to do.
"""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import kvist
import letters
from family_configs import CONFIGS, random_model
from kvist.cache.check import check
from kvist.cli.main import run
from kvist.compose import LLM
from kvist.verify.compare import assert_bits_equal, bits_equal
from probing import all_logits

# Block sizes and threads: some in every run, all of them in the full one.
SOME, ALL = ((16, 64, 256), (1, 2)), ((16, 32, 64, 128, 256, 384), (1, 2, 3, 5))
DTYPES = ("float32", "bfloat16", "float16")
BOUNDS = {"all keys": {}, "a window": {"kv_window": 70, "kv_sinks": 0}, "sinks": {"kv_window": 70, "kv_sinks": 20}}
LENGTH = 300  # more than two splits, and many windows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("settings")
    random_model(CONFIGS["qwen3"]()).save_pretrained(root)
    return letters.save(root)


def load(folder: Path, **settings: Any) -> LLM:
    return kvist.load(folder, **{"ctx_size": 512, "max_num_seqs": 64, **settings})


def tokens(count: int, seed: int = 3) -> list[int]:
    return torch.randint(0, letters.SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("ways", [SOME, pytest.param(ALL, marks=pytest.mark.full)], ids=["some", "all"])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_every_combination_gives_the_same_bits(
    folder: Path, weights: str, dtype: str, bounds: str, ways: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    settings = {"dtype": weights, "kv_cache_dtype": dtype, **BOUNDS[bounds]}
    prompts = [tokens(90), tokens(200, 4), tokens(3, 5)]
    right = text = None
    for block, threads in product(*ways):
        llm = load(folder, block_size=block, threads=threads, **settings)
        assert llm.setup is not None
        assert (llm.setup.kv_cache_dtype, llm.setup.block_size) == (dtype, block)
        found = all_logits(llm, tokens(LENGTH), 100)
        answers = [done.ids for done in llm.generate(prompts, max_tokens=30, ignore_eos=True)]
        check(llm.engine.groups, llm.engine.pools, llm.engine.tables)
        if right is None:
            right, text = found, answers
        assert_bits_equal(found, right, f"blocks of {block}, {threads} threads")
        assert answers == text, f"blocks of {block}, {threads} threads"


def test_types_and_windows_are_functions_of_their_own(folder: Path) -> None:
    """Else the test above could not see whether a setting arrives."""
    found = [
        all_logits(load(folder, kv_cache_dtype=dtype, **bounds), tokens(LENGTH), 100)
        for dtype, bounds in product(DTYPES, BOUNDS.values())
    ]
    assert not any(bits_equal(a, b) for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize("bounds", [[], ["--kv-window", "40", "--kv-sinks", "2"]], ids=["all keys", "sinks"])
def test_the_command_in_every_combination(folder: Path, bounds: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    for dtype in DTYPES:
        texts = set()
        for block, threads in product((16, 128), (1, 2)):
            arguments = ["run", str(folder), "--no-chat-template", "-n", "20", "--json", "--kv-cache-dtype", dtype]
            arguments += ["--block-size", str(block), "--threads", str(threads), *bounds, "abcdefgh" * 12]
            assert run(arguments) == 0, capfd.readouterr().err
            found = json.loads(capfd.readouterr().out)
            assert found["cache"]["dtype"] == dtype
            texts.add(found["text"])
        assert len(texts) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--block-size", "0"], r"block size 0 .*multiple of 16: use 16, 32, 64, 128"),
        (["--block-size", "-16"], r"block size -16 .*use 16, 32, 64, 128"),
        (["--block-size", "24"], r"block size 24 .*use 16, 32, 64, 128"),
        (["--block-size", "48"], r"block size 48 neither divides nor is a multiple of 128: use 16"),
        (["--block-size", "1.5"], r"Invalid value for '--block-size'"),
        (["--block-size", "99999999999999999999"], r"block size 99999999999999999999"),
        (["--threads", "0"], r"--threads is 0: .*1"),
        (["--threads", "-1"], r"--threads is -1: .*1"),
        (["--threads", "1000000"], r"--threads is 1000000: .*1 to"),
        (["--threads", "two"], r"Invalid value for '--threads'"),
        (["--kv-cache-dtype", "int8"], r"--kv-cache-dtype: .*'int8'.*float32, bfloat16, float16, or auto"),
        (["--kv-cache-dtype", ""], r"--kv-cache-dtype: .*''.*float32, bfloat16, float16, or auto"),
        (["--kv-window", "0"], r"--kv-window is 0: .*1"),
        (["--kv-window", "-4"], r"--kv-window is -4: .*1"),
        (["--kv-sinks", "2"], r"--kv-sinks is 2: .*together with --kv-window"),
        (["--kv-window", "8", "--kv-sinks", "-2"], r"--kv-sinks is -2: use 0 or more"),
        (["--kv-window", "509"], r"kv_window 509 and 4 sinks keep all of the 512 .*lower kv_window, raise ctx_size"),
        (["--kv-window", "99999999999999"], r"kv_window 99999999999999 and 4 sinks keep all of the 512"),
        (["--kv-window", "8", "--kv-sinks", "99999999999999"], r"8 and 99999999999999 sinks keep all of the 512"),
        (["--ctx-size", "513"], r"ctx_size is 513, .*512"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    folder: Path, arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", str(folder), *arguments, "abc"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("kvist: ") and err.count("\n") == 1, err
    assert re.search(words, err), err
