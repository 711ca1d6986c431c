"""compose/llm: text on both sides of the engine, over a decoder that reads what it stored, with a real tokenizer."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

import letters
from kvist.base.errors import BadSampling, TooLong, UsageError
from kvist.compose import LLM
from kvist.engine.request import Sampling
from kvist.text.tokenizer import Tokenizer
from reading_decoder import VOCAB, World, greedy

PROMPTS = ["Hello", "a", "no end in sight", "Hello again"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(letters.save(tmp_path_factory.mktemp("letters")))


def make(tokenizer: Tokenizer, **settings: object) -> tuple[LLM, World]:
    world = World(**{"eos": tokenizer.eos_token_ids, **settings})  # type: ignore[arg-type]
    return LLM(world.engine, tokenizer, VOCAB), world


def expected_text(tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """From the plain list of ids, cut at the end token."""
    ids = greedy(tokenizer.encode(prompt), count)
    return tokenizer.decode(ids[: ids.index(letters.END)] if letters.END in ids else ids, continuation=True)


def test_one_or_many(tokenizer: Tokenizer) -> None:
    llm, world = make(tokenizer)
    many = llm.generate(PROMPTS, max_tokens=12)
    assert [completion.text for completion in many] == [expected_text(tokenizer, prompt, 12) for prompt in PROMPTS]
    one = llm.generate("Hello", max_tokens=12)
    assert (one.text, one.ids, one.finish_reason) == (many[0].text, many[0].ids, many[0].finish_reason)
    assert llm.generate([tokenizer.encode("Hello")], max_tokens=12)[0].ids == one.ids
    assert world.free == [64]


def test_a_completion_counts_and_times(tokenizer: Tokenizer) -> None:
    llm, _ = make(tokenizer)
    done = llm.generate("Hello", max_tokens=6, ignore_eos=True)
    assert (done.prompt_tokens, done.generated_tokens, done.finish_reason) == (5, 6, "length")
    assert (done.projections, done.projections_without_cache) == (10, 5 + 6 + 7 + 8 + 9 + 10)
    assert done.ttft_s and done.prefill_tok_s and done.decode_tok_s
    single = llm.generate("Hello", max_tokens=1)
    assert single.decode_tok_s is None


def test_pieces_join_to_the_text_without_a_cache_too(tokenizer: Tokenizer) -> None:
    for cache in (True, False):
        llm, _ = make(tokenizer, cache=cache, ctx_size=64)
        for prompt in PROMPTS:
            stream = llm.stream(prompt, max_tokens=30, ignore_eos=True)
            pieces = list(stream)
            assert "".join(pieces) == stream.completion.text == expected_text_ignoring(tokenizer, prompt, 30)
            assert len(pieces) > 5
            assert all(pieces)


def expected_text_ignoring(tokenizer: Tokenizer, prompt: str, count: int) -> str:
    return tokenizer.decode(greedy(tokenizer.encode(prompt), count), continuation=True)


def test_streams_taken_in_turns_equal_solo_runs(tokenizer: Tokenizer) -> None:
    llm, world = make(tokenizer, max_num_seqs=2)
    streams = [llm.stream(prompt, max_tokens=15) for prompt in PROMPTS]
    texts = ["" for _ in PROMPTS]
    left = list(range(len(PROMPTS)))
    while left:
        for i in list(left):
            piece = next(streams[i], None)
            if piece is None:
                left.remove(i)
            else:
                texts[i] += piece
    assert texts == [expected_text(tokenizer, prompt, 15) for prompt in PROMPTS]
    assert world.free == [64]


def test_threads_share_the_engine(tokenizer: Tokenizer) -> None:
    llm, world = make(tokenizer, max_num_seqs=8)
    found: dict[int, str] = {}

    def work(i: int) -> None:
        prompt = PROMPTS[i % len(PROMPTS)]
        found[i] = "".join(llm.stream(prompt, max_tokens=12)) if i % 2 else llm.generate(prompt, max_tokens=12).text

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {i: expected_text(tokenizer, PROMPTS[i % len(PROMPTS)], 12) for i in range(12)}
    assert world.free == [64]
    world.check()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_is_never_printed_and_ends_with_stop(tokenizer: Tokenizer, length: int) -> None:
    llm, world = make(tokenizer)
    whole = llm.generate("Hello", max_tokens=40, ignore_eos=True)
    stop = whole.text[8 : 8 + length]  # letters are tokens: two of them cross a token border
    cut = whole.text[: whole.text.index(stop)]
    stream = llm.stream("Hello", max_tokens=40, ignore_eos=True, stop=(stop, "never there"))
    pieces = list(stream)
    assert "".join(pieces) == cut
    assert stream.completion.finish_reason == "stop"
    assert stream.completion.generated_tokens < 40
    assert world.engine.metrics.finished["stop"] == 1
    assert world.free == [64]


def test_a_stop_string_on_the_last_token_is_a_stop(tokenizer: Tokenizer) -> None:
    llm, _ = make(tokenizer)
    whole = llm.generate("Hello", max_tokens=1, ignore_eos=True)
    assert whole.text
    done = llm.generate("Hello", max_tokens=1, ignore_eos=True, stop=(whole.text,))
    assert (done.text, done.finish_reason) == ("", "stop")


def test_half_a_stop_string_is_printed_in_the_end(tokenizer: Tokenizer) -> None:
    llm, _ = make(tokenizer)
    whole = llm.generate("Hello", max_tokens=10, ignore_eos=True)
    done = llm.generate("Hello", max_tokens=10, ignore_eos=True, stop=(whole.text[-1] + "###",))
    assert (done.text, done.finish_reason) == (whole.text, "length")


def test_an_end_token_ends_and_is_counted_but_not_printed(tokenizer: Tokenizer) -> None:
    ids = greedy(tokenizer.encode("Hello"), 6)
    llm, _ = make(tokenizer, eos=[ids[4]])
    done = llm.generate("Hello", max_tokens=6)
    assert done.ids == tuple(ids[:5])
    assert done.text == tokenizer.decode(ids[:4], continuation=True)
    assert done.finish_reason == "stop"


def test_closing_a_stream_early_gives_its_blocks_back(tokenizer: Tokenizer) -> None:
    llm, world = make(tokenizer)
    with llm.stream("Hello", max_tokens=40, ignore_eos=True) as stream:
        next(stream)
    assert world.free == [64]
    assert stream.completion.finish_reason == "abort"
    stream.close()
    unstarted = llm.stream("Hello")
    unstarted.close()
    assert unstarted.completion.finish_reason == "abort"
    assert list(unstarted) == []
    assert world.engine.idle


def test_a_stream_that_nobody_holds_gives_its_blocks_back(tokenizer: Tokenizer) -> None:
    llm, world = make(tokenizer)
    for _ in llm.stream("Hello", max_tokens=40, ignore_eos=True):
        break
    gc.collect()
    assert world.free == [64]
    assert world.engine.idle


def test_an_abandoned_stream_inside_a_step_waits_for_its_end(tokenizer: Tokenizer) -> None:
    """Garbage collection may run in the middle of a step, in the thread that holds the lock."""
    llm, world = make(tokenizer)
    streams = [llm.stream("Hello", max_tokens=40, ignore_eos=True)]
    other = llm.stream("a", max_tokens=10, ignore_eos=True)
    next(streams[0])
    forward = world.decoder.forward

    def collecting(step: object) -> object:
        streams.clear()
        gc.collect()
        return forward(step)  # type: ignore[arg-type]

    world.decoder.forward = collecting  # type: ignore[method-assign,assignment]
    assert "".join(other) == expected_text_ignoring(tokenizer, "a", 10)
    assert world.engine.idle
    assert world.free == [64]


def test_a_refused_prompt_leaves_nobody_behind(tokenizer: Tokenizer) -> None:
    llm, world = make(tokenizer, ctx_size=16)
    with pytest.raises(TooLong, match="prompt has 20 tokens, the context holds 16"):
        llm.generate(["fits", "x" * 20])
    assert world.engine.idle
    with pytest.raises(UsageError, match="prompt is empty"):
        llm.generate(["fits", ""])
    with pytest.raises(UsageError, match="no token"):
        llm.generate([[]])
    with pytest.raises(UsageError, match="token id 61 is not in the model's vocabulary: use 0 to 60"):
        llm.generate([[1, 61]])
    with pytest.raises(BadSampling, match="unknown setting temprature"):
        llm.generate("fits", temprature=1.0)
    with pytest.raises(BadSampling, match="beside a Sampling record"):
        llm.generate("fits", Sampling(), max_tokens=3)
    assert world.engine.idle
    assert not world.decoder.steps


def test_a_step_that_raises_ends_the_call_and_leaves_the_engine_usable(tokenizer: Tokenizer) -> None:
    llm, world = make(tokenizer)
    world.decoder.fail_at = 3
    with pytest.raises(RuntimeError, match="planted"):
        llm.generate(PROMPTS, max_tokens=12)
    assert world.engine.idle
    assert world.free == [64]
    assert llm.generate("Hello", max_tokens=12).text == expected_text(tokenizer, "Hello", 12)


def test_chat_goes_through_the_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    llm, _ = make(tokenizer)
    messages = [{"role": "user", "content": "Hi"}]
    done = llm.chat(messages, max_tokens=5, ignore_eos=True)
    assert done.ids == tuple(greedy(tokenizer.encode("uHia"), 5))
    assert "".join(llm.stream_chat(messages, max_tokens=5, ignore_eos=True)) == done.text
    bare, _ = make(Tokenizer.from_folder(letters.save(tmp_path, template=None)))
    with pytest.raises(UsageError, match="no chat template"):
        bare.chat(messages)


def test_seeds_repeat_a_run(tokenizer: Tokenizer) -> None:
    llm, _ = make(tokenizer)
    first = llm.generate("Hello", temperature=1.0, max_tokens=12)
    assert llm.generate("Hello", temperature=1.0, max_tokens=12, seed=first.seed).ids == first.ids
    assert llm.generate("Hello", temperature=1.0, max_tokens=12).seed != first.seed


def test_a_closed_llm_refuses(tokenizer: Tokenizer) -> None:
    llm, world = make(tokenizer)
    with llm:
        stream = llm.stream("Hello")
        next(stream)
    assert stream.completion.finish_reason == "abort"
    assert world.free == [64]
    with pytest.raises(UsageError, match="closed"):
        llm.generate("Hello")
