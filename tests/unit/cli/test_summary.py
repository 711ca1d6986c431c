from __future__ import annotations

import io
import sys
import time

import pytest

from kvist.cli import progress as bars
from kvist.cli.summary import CacheFacts, as_lines, as_object, seconds, size, totals
from kvist.compose import Completion

CACHE = CacheFacts(1 << 20, 512, "bfloat16", "keys and values of 2 layers x 1 kv head x 64", 2048, kept=True)


def completion(**changes: object) -> Completion:
    facts: dict[str, object] = {
        "text": "one",
        "ids": (1, 2, 3),
        "finish_reason": "stop",
        "error": None,
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "seed": 0,
        "projections": 12,
        "projections_without_cache": 33,
        "ttft_s": 0.5,
        "prefill_s": 0.4,
        "decode_s": 0.1,
    }
    return Completion(**(facts | changes))  # type: ignore[arg-type]


def test_the_object_has_the_promised_keys() -> None:
    found = as_object(totals([completion()]), CACHE)
    assert found == {
        "text": "one",
        "prompt_tokens": 10,
        "generated_tokens": 3,
        "prefill_tok_s": 25.0,
        "decode_tok_s": 20.0,
        "ttft_s": 0.5,
        "cache": {"bytes": 1 << 20, "bytes_per_token": 512, "dtype": "bfloat16", "tokens_seen": 12, "rows_kept": 12},
        "projections": {"with_cache": 12, "without_cache": 33},
    }


def test_sums_over_a_chat() -> None:
    other = completion(text="two", ids=(1,), ttft_s=None, prefill_s=None, decode_s=None, finish_reason="abort")
    run = totals([completion(), other])
    assert (run.text, run.prompt_tokens, run.generated_tokens) == ("onetwo", 20, 4)
    assert (run.prefill_tok_s, run.decode_tok_s, run.ttft_s) == (25.0, 20.0, 0.5)  # of what was measured
    assert (run.with_cache, run.without_cache) == (24, 66)
    assert "4 tokens, 20.0 tokens/s, interrupted" in as_lines(run, CACHE)[1]


def test_what_was_not_read_was_not_seen() -> None:
    """Ctrl-C while the prompt is read."""
    ended = completion(
        ids=(),
        finish_reason="abort",
        projections=4,
        projections_without_cache=0,
        cached_tokens=3,
        ttft_s=None,
        prefill_s=None,
        decode_s=None,
    )
    run = totals([ended])
    assert (run.tokens_seen, run.unread) == (7, 3)
    assert as_object(run, CACHE)["cache"]["tokens_seen"] == as_object(run, CACHE)["cache"]["rows_kept"] == 7
    lines = as_lines(run, CACHE)
    assert lines[0] == "prompt       10 tokens (3 of them in the cache) (3 of them not read)"
    assert lines[-1] == "projections  4 tokens through the layers"


def test_lines() -> None:
    text = "\n".join(as_lines(totals([completion(finish_reason="length")]), CACHE))
    assert "10 tokens, 25.0 tokens/s, first token after 500 ms" in text
    assert "cut off at the limit" in text
    assert "512 bytes per token, 1.0 MiB for a context of 2,048 tokens" in text
    assert "bfloat16, keys and values of 2 layers x 1 kv head x 64" in text
    assert "12 tokens through the layers; 33 without a cache (2.8 times as many)" in text


def test_tokens_found_in_the_cache_are_not_counted_as_computed() -> None:
    run = totals([completion(cached_tokens=8)])
    assert run.prefill_tok_s == 5.0
    assert "10 tokens (8 of them in the cache), 5.0 tokens/s" in as_lines(run, CACHE)[0]


def test_lines_when_nothing_came() -> None:
    nothing = completion(text="", ids=(), ttft_s=None, prefill_s=None, decode_s=None, projections=0)
    text = "\n".join(as_lines(totals([nothing]), CACHE))
    assert "0 tokens" in text and "None" not in text
    assert as_object(totals([nothing]), CACHE)["decode_tok_s"] is None


def test_lines_without_a_cache() -> None:
    bare = CacheFacts(1 << 20, 512, "float32", "2 layers x 2 kv heads x 64", 2048, kept=False)
    text = "\n".join(as_lines(totals([completion(projections=33)]), bare))
    assert "nothing kept between steps (--no-cache)" in text and "times as many" not in text


def test_numbers() -> None:
    assert [size(n) for n in (0, 1023, 1024, 3 << 30)] == ["0 B", "1,023 B", "1.0 KiB", "3.0 GiB"]
    assert [seconds(s) for s in (0.0312, 1.5)] == ["31 ms", "1.50 s"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("patience", "kind", "shown"), [(0.0, Terminal, True), (0.0, io.StringIO, False), (60, Terminal, False)]
)
def test_a_bar_is_for_long_work_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, patience: float, kind: type[io.StringIO], shown: bool
) -> None:
    monkeypatch.setattr(bars, "PATIENCE_S", patience)
    monkeypatch.setattr(bars, "LOOK_S", 0.01)
    monkeypatch.setattr(sys, "stderr", kind())
    with bars.progress("loading") as bar:
        for done in range(3):
            bar(done, 2)
    with bars.watching("reading", lambda: 5, 10):
        time.sleep(0.1)
    text = sys.stderr.getvalue()
    assert ("loading" in text and "reading" in text) is shown
    assert shown or text == ""
