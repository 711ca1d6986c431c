"""Law 1 under histories that nobody chose: any chunks, any neighbours, any cuts, in any order."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.base.dtypes import BFLOAT16
from kvist.verify.course import Course, Lane
from kvist.verify.laws import Laws
from random_models import KINDS, VOCAB, random_tokens, subject

LENGTH = 300
TOKENS = random_tokens(LENGTH)

# (what, size): feed this many; feed and cut this many wrong ones; feed the neighbour too; it leaves.
Move = tuple[str, int]
MOVES = st.lists(
    st.tuples(st.sampled_from(["feed", "feed", "both", "wrong", "leave"]), st.integers(1, 90)), min_size=1, max_size=14
)


@cache
def expected(kind: str) -> dict[int, bytes]:
    return Laws(subject(kind, BFLOAT16), TOKENS).baseline()


def play(kind: str, block_size: int, moves: list[Move]) -> tuple[Course, Lane]:
    course = Course(subject(kind, BFLOAT16), length=LENGTH, lanes=2, block_size=block_size, step_tokens=256)
    lane, other = course.lane(TOKENS), course.lane(list(reversed(TOKENS)))
    for what, size in moves:
        at = lane.table.written
        n = min(size, LENGTH - at)
        if what == "leave":
            other.table.release()
        if n == 0:
            break
        if what == "feed":
            course.feed([(lane, n)])
        elif what == "both":
            beside = min(size // 3 + 1, LENGTH - other.table.written)
            course.feed(
                [(other, beside), (lane, n)] if size % 2 else [(lane, n), (other, beside)] if beside else [(lane, n)]
            )
        elif what == "wrong":
            right = lane.tokens[at : at + n]
            lane.tokens[at : at + n] = [(token + 1) % VOCAB for token in right]
            course.feed([(lane, n)], keep=False)
            lane.tokens[at : at + n] = right
            course.back_to(lane, at, 64)
    return course, lane


@pytest.mark.parametrize("kind", ["grouped", "windows", "multi-query", "latents", "latents and experts"])
@settings(max_examples=40)
@given(block_size=st.sampled_from([16, 32, 64, 128, 256]), moves=MOVES)
def test_any_history_gives_the_same_bits(kind: str, block_size: int, moves: list[Move]) -> None:
    assert kind in KINDS
    _, lane = play(kind, block_size, moves)
    right = expected(kind)
    assert {p: digest for p, digest in lane.digests.items() if digest != right[p]} == {}


@pytest.mark.full
@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=600)
@given(block_size=st.sampled_from([16, 32, 64, 128, 256]), moves=MOVES)
def test_thousands_of_histories(kind: str, block_size: int, moves: list[Move]) -> None:
    _, lane = play(kind, block_size, moves)
    right = expected(kind)
    assert {p: digest for p, digest in lane.digests.items() if digest != right[p]} == {}
