"""The engine on real weights: what a prompt gets does not depend on the batch, on chunks or on having a cache."""

from __future__ import annotations

import pytest

from kvist import load
from kvist.compose import LLM

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "The sea is",
]
TOKENS = 64


def answers(llm: LLM, prompts: list[str], count: int = TOKENS) -> list[tuple[int, ...]]:
    return [done.ids for done in llm.generate(prompts, max_tokens=count, ignore_eos=True)]


@pytest.mark.slow
def test_batch_alone_and_without_a_cache_agree_on_smollm2() -> None:
    llm = load("smollm2", ctx_size=512)
    together = answers(llm, PROMPTS)
    assert llm.tokenizer.decode(together[0], continuation=True).startswith(" Paris")
    assert together == [answers(llm, [prompt])[0] for prompt in PROMPTS]
    bare = load("smollm2", ctx_size=512, cache=False)
    done = bare.generate(PROMPTS, max_tokens=TOKENS, ignore_eos=True)
    assert [one.ids for one in done] == together
    for one in done:
        n = one.prompt_tokens
        assert one.projections == one.projections_without_cache == sum(range(n, n + TOKENS))


@pytest.mark.slow
def test_gemma3_beyond_its_window() -> None:
    llm = load("gemma3", ctx_size=1024, max_num_seqs=2)
    prompts = ["Once upon a time there was a king who had three sons. " * 55, "The sea is"]
    assert len(llm.tokenizer.encode(prompts[0])) > 600  # the window has 512
    together = answers(llm, prompts, 16)
    assert together == [answers(llm, [prompt], 16)[0] for prompt in prompts]
    sliding = next(group for group in llm.engine.groups if group.window == 512)
    with llm.stream(prompts[0]) as stream:
        next(stream)
        assert llm.engine.tables[0].start(sliding.index) > 0  # the window has slid, and given blocks back
    assert answers(load("gemma3", ctx_size=1024, max_num_seqs=2, cache=False), prompts, 4) == [
        found[:4] for found in together
    ]
