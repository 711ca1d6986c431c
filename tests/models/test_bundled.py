"""Both bundled models against ``transformers`` (float32, eager attention), which is told only token ids.

That greedy tokens are the same is judged by one forward of ``transformers`` over prompt and answer: every token of the
answer must be the likeliest one behind all before it, which is what greedy decoding takes. The ``full`` test decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pydoc_data.topics import topics

import pytest
import torch

import hf_models
import kvist
from kvist.compose import LLM
from kvist.spec.source import resolve
from kvist.verify.compare import KL_BFLOAT16, LOGITS, kl_divergence, largest_row_error
from probing import pieces

pytestmark = pytest.mark.slow

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "Ein Gedicht über den Regen:\n\n",
]
ANSWER = 64
# Gemma's sliding layers see 512 tokens: its text goes well past them, and so covers the 512 tokens as well.
LENGTH = {"smollm2": 512, "gemma3": 740}
CHUNK = 200  # prefilled in pieces that end inside blocks and splits
ROWS = 32  # of logits at once


@pytest.fixture(params=list(LENGTH))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True, scope="module")
def forget() -> Iterator[None]:
    yield
    loaded.cache_clear()
    theirs.cache_clear()


@cache
def loaded(model: str, dtype: str) -> LLM:
    return kvist.load(model, dtype=dtype, ctx_size=1024, max_num_seqs=ROWS)


@cache
def theirs(model: str) -> hf_models.PreTrainedModel:
    return hf_models.bundled(resolve(model).path, hf_models.CONFIGS[model])


def text(model: str) -> list[int]:
    """Prose of the standard library."""
    words = topics["dynamic-features"] + topics["objects"] + topics["naming"] + topics["exceptions"]
    tokens = loaded(model, "float32").tokenizer.encode(words)
    assert len(tokens) > LENGTH[model]
    return tokens[: LENGTH[model]]


def test_logits_at_every_position(model: str, record_property: Callable[[str, object], None]) -> None:
    llm, reference = loaded(model, "float32"), theirs(model)
    tokens = text(model)
    assert llm.setup is not None and llm.setup.dtype == llm.setup.kv_cache_dtype == "float32"
    states = hf_models.hidden(reference, tokens)
    seen, worst = 0, 0.0
    for first, ours in pieces(llm, tokens, CHUNK):
        assert first == seen
        expected = hf_models.logits(reference, states[first : first + len(ours)])
        worst = max(worst, largest_row_error(ours, expected))
        assert worst < LOGITS, f"positions {first} to {first + len(ours)}"  # of every row, and so of all together
        seen += len(ours)
    assert seen == LENGTH[model]
    assert worst > 0  # 0: it was compared with itself
    record_property("largest_row_error", worst)


def answers(model: str) -> list[tuple[list[int], list[int]]]:
    """(prompt, 64 greedy tokens) of each prompt, all in one batch."""
    llm = loaded(model, "float32")
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    done = llm.generate(prompts, max_tokens=ANSWER, ignore_eos=True)
    return [(prompt, list(one.ids)) for prompt, one in zip(prompts, done, strict=True)]


def test_the_same_greedy_tokens(model: str) -> None:
    reference = theirs(model)
    for prompt, answer in answers(model):
        assert len(answer) == ANSWER
        states = hf_models.hidden(reference, prompt + answer[:-1])[-ANSWER:]
        assert hf_models.logits(reference, states).argmax(-1).tolist() == answer


@pytest.mark.full
def test_transformers_decodes_the_same_tokens(model: str) -> None:
    reference = theirs(model)
    for prompt, answer in answers(model):
        found = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=ANSWER,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert found[0, len(prompt) :].tolist() == answer


def test_greedy_tokens_beyond_the_window() -> None:
    llm, reference = loaded("gemma3", "float32"), theirs("gemma3")
    prompt = text("gemma3")[:700]
    answer = list(llm.generate([prompt], max_tokens=ANSWER, ignore_eos=True)[0].ids)
    states = hf_models.hidden(reference, prompt + answer[:-1])[-ANSWER:]
    assert hf_models.logits(reference, states).argmax(-1).tolist() == answer


def test_bfloat16_stays_near_float32(
    model: str, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    tokens = text(model)[:512]
    exact, rounded = loaded(model, "float32"), loaded(model, "bfloat16")
    assert rounded.setup is not None and rounded.setup.dtype == rounded.setup.kv_cache_dtype == "bfloat16"
    stride = 1 if model == "smollm2" else 4  # of a large vocabulary some positions are enough
    total, seen = 0.0, 0
    for (first, a), (other, b) in zip(pieces(rounded, tokens, CHUNK), pieces(exact, tokens, CHUNK), strict=True):
        assert first == other
        a, b = a[-first % stride :: stride], b[-first % stride :: stride]
        total, seen = total + kl_divergence(a, b) * len(a), seen + len(a)
    divergence = total / seen
    record_property("mean_kl_nats", divergence)
    with capsys.disabled():
        print(f"\n{model}: mean KL of bfloat16 to float32 over {seen} positions: {divergence:.2e} nats")
    assert seen == 512 / stride
    assert 0 < divergence < KL_BFLOAT16
