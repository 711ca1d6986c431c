from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.base.errors import BadSampling
from kvist.text.stream import StopStrings, TextStream


def run(pieces: list[bytes], stop: tuple[str, ...] = (), drop_space: bool = False) -> tuple[str, str | None]:
    stream = TextStream(pieces.__getitem__, stop, drop_space=drop_space)
    text = "".join([stream.push(i) for i in range(len(pieces))] + [stream.finish()])
    return text, stream.stopped_by


def cut(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """What the text is until the first stop string completes, found the slow way."""
    for end in range(1, len(text) + 1):
        for length in range(end, 0, -1):
            if text[end - length : end] in stop:
                return text[: end - length], text[end - length : end]
    return text, None


@st.composite
def splits(draw: st.DrawFn, data: bytes) -> list[bytes]:
    marks = draw(st.lists(st.integers(0, len(data)), max_size=12).map(sorted))
    edges = [0, *marks, len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


letters = st.text(alphabet="ab€é😀 ", max_size=24)
stops = st.lists(st.text(alphabet="ab€😀", min_size=1, max_size=4), max_size=3).map(tuple)


@given(st.data(), letters, stops)
def test_any_split_gives_the_same_text(data: st.DataObject, text: str, stop: tuple[str, ...]) -> None:
    pieces = data.draw(splits(text.encode()))
    assert run(pieces, stop) == cut(text, stop)


@given(st.data(), st.binary(max_size=24))
def test_broken_bytes_print_as_in_the_whole(data: st.DataObject, raw: bytes) -> None:
    assert run(data.draw(splits(raw)))[0] == raw.decode(errors="replace")


@given(st.data(), letters, stops)
def test_nothing_is_held_back_that_cannot_become_a_stop(data: st.DataObject, text: str, stop: tuple[str, ...]) -> None:
    pieces = data.draw(splits(text.encode()))
    stream = TextStream(pieces.__getitem__, stop)
    printed, raw = "", b""
    for i, piece in enumerate(pieces):
        printed += stream.push(i)
        raw += piece
        if stream.stopped_by is not None:
            break
        seen = raw.decode(errors="ignore")  # whole characters so far
        held = max((n for s in stop for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert printed == seen[: len(seen) - held]


def test_half_a_character_is_never_printed() -> None:
    stream = TextStream([b"a", b"\xf0\x9f", b"\x98", b"\x80", b"\xe2\x82"].__getitem__)
    assert [stream.push(i) for i in range(5)] == ["a", "", "", "😀", ""]
    assert stream.finish() == "\ufffd"


def test_a_stop_string_over_token_borders_is_not_printed() -> None:
    pieces = [b"one ", b"<", b"en", b"d> two"]
    stream = TextStream(pieces.__getitem__, ("<end>",))
    assert [stream.push(i) for i in range(4)] == ["one ", "", "", ""]
    assert stream.stopped_by == "<end>"
    assert stream.push(0) == "" and stream.finish() == ""


def test_what_only_looked_like_a_stop_is_printed() -> None:
    stream = TextStream([b"<e", b"x", b"<en"].__getitem__, ("<end>",))
    assert [stream.push(i) for i in range(3)] == ["", "<ex", ""]
    assert stream.finish() == "<en"
    assert stream.stopped_by is None


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("xabc", ("abc", "b"), ("xa", "b")),  # the first to complete
        ("xab", ("ab", "b"), ("x", "ab")),  # both complete at once: the longer
        ("aab", ("ab",), ("a", "ab")),  # the beginning restarts inside itself
        ("ababac", ("abac",), ("ab", "abac")),
        ("nothing", ("#",), ("nothing", None)),
    ],
)
def test_which_stop_string_wins(text: str, stop: tuple[str, ...], expected: tuple[str, str | None]) -> None:
    assert run([text.encode()], stop) == expected
    assert run([c.encode() for c in text], stop) == expected


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadSampling, match="empty string"):
        StopStrings(["x", ""])


def test_the_first_space_is_dropped_once() -> None:
    assert run([b"", b" one", b" two"], drop_space=True)[0] == "one two"
    assert run([b"one", b" two"], drop_space=True)[0] == "one two"


def test_work_per_token_does_not_grow() -> None:
    """A stop string that nearly completes all the time: characters looked at stay proportional to the text."""
    steps = 0

    class Counting(StopStrings):
        def step(self, state: int, character: str) -> int:
            nonlocal steps
            steps += 1
            return super().step(state, character)

    stream = TextStream(lambda _: b"a", ("a" * 50 + "b",))
    stream._stops = Counting(["a" * 50 + "b"])
    steps = 0  # building the automaton also steps
    start = time.perf_counter()
    printed = [stream.push(0) for _ in range(20_000)]
    assert steps == 20_000
    assert sum(map(len, printed)) == 20_000 - 50
    assert time.perf_counter() - start < 5
