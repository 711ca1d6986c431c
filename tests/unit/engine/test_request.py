"""engine/request: settings that are refused, and the ids of a request."""

from __future__ import annotations

from typing import Any

import pytest

from kvist.base.errors import BadSampling, UsageError
from kvist.engine.metrics import Timing
from kvist.engine.request import FinishReason, Request, Sampling


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -0.5}, ["temperature is -0.5", "0 to 1e6", "0 is greedy"]),
        ({"temperature": float("nan")}, ["temperature is nan"]),
        ({"temperature": float("inf")}, ["temperature is inf"]),
        ({"temperature": "1"}, ["temperature is '1'", "not a number"]),
        ({"temperature": True}, ["temperature is True"]),
        ({"temperature": 1.0, "top_k": -1}, ["top_k is -1", "0 (off) or more", "leave it out"]),
        ({"temperature": 1.0, "top_k": 2.5}, ["top_k is 2.5", "whole number"]),
        ({"temperature": 1.0, "top_p": 0}, ["top_p is 0", "use temperature 0"]),
        ({"temperature": 1.0, "top_p": 1.2}, ["top_p is 1.2", "up to 1"]),
        ({"temperature": 1.0, "min_p": -0.1}, ["min_p is -0.1", "0 to 1"]),
        ({"seed": -1}, ["seed is -1", "18446744073709551615"]),
        ({"seed": 1 << 64}, ["seed is 18446744073709551616"]),
        ({"max_tokens": 0}, ["max_tokens is 0", "1 or more"]),
        ({"max_tokens": -3}, ["max_tokens is -3"]),
        ({"stop": "END"}, ["stop is 'END'", "tuple of strings"]),
        ({"stop": ("a", 3)}, ["stop is"]),
        ({"stop": ("a", "")}, ["empty string"]),
        ({"temperature": 0, "top_k": 40}, ["top_k is 40 while temperature is 0", "leave top_k out"]),
        ({"top_p": 0.9}, ["top_p is 0.9 while temperature is 0"]),
        ({"min_p": 0.05}, ["min_p is 0.05 while temperature is 0"]),
    ],
)
def test_bad_settings_name_value_limit_and_remedy(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(BadSampling) as caught:
        Sampling(**settings)
    for word in words:
        assert word in str(caught.value)


def test_values_that_switch_a_filter_off_contradict_nothing() -> None:
    assert Sampling(temperature=0, top_k=0, top_p=1.0, min_p=0.0).greedy
    assert not Sampling(temperature=0.1, top_k=40, top_p=0.9, min_p=0.1).greedy


def test_stop_is_kept_apart_from_the_callers_list() -> None:
    stop = ["a", "b"]
    sampling = Sampling(stop=stop)  # type: ignore[arg-type]
    stop.append("c")
    assert sampling.stop == ("a", "b")


def request(
    prompt: tuple[int, ...] = (5, 6, 7), max_new: int = 3, stop_ids: frozenset[int] = frozenset({9})
) -> Request:
    return Request(0, prompt, Sampling(), 0, max_new, stop_ids, Timing(0.0))


def test_ids_across_the_border_of_prompt_and_generated() -> None:
    one = request()
    one.generated.extend([1, 2])
    whole = [5, 6, 7, 1, 2]
    for start in range(6):
        for stop in range(start, 6):
            assert one.ids(start, stop) == whole[start:stop], (start, stop)
    one.written = 4
    assert one.unwritten == (2,)


def test_endings() -> None:
    one = request()
    assert one.ending(4) is None
    assert one.ending(9) is FinishReason.STOP
    one.generated.extend([1, 2])
    assert one.ending(4) is FinishReason.LENGTH
    assert one.ending(9) is FinishReason.STOP  # an end token on the last place is an end, not a cut


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="no token"):
        request(prompt=())
