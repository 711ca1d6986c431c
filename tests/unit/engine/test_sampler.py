"""engine/sampler: the stream, the order of settings, and what ties and odd logits do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvist.base.errors import KernelError
from kvist.engine.request import Sampling
from kvist.engine.sampler import distribution, fresh_seed, sample, uniform

# A float64 sum of thousands of weights may differ in its last bits with the order of additions; a draw this close to
# the border between two tokens may fall on either side. Stays here: it compares no tensors.
BORDER = 1e-12


def test_philox_is_the_published_one() -> None:
    # First words of the known-answer vectors that come with Philox4x64-10 (Random123, kat_vectors).
    zeros = 0x16554D9ECA36314C
    ones = 0x87B092C3013FE90B
    assert uniform(0, 0) == (zeros >> 11) * 2.0**-53
    all_ones_counter = np.random.Philox(counter=2**256 - 2, key=2**128 - 1).random_raw()
    assert int(all_ones_counter) == ones


def test_uniform_depends_on_seed_and_index_alone() -> None:
    forwards = [uniform(7, index) for index in range(50)]
    backwards = [uniform(7, index) for index in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert len({*forwards, *(uniform(8, index) for index in range(50))}) == 100
    assert all(0 <= value < 1 for value in forwards)
    assert 0.4 < np.mean([uniform(3, index) for index in range(2000)]) < 0.6
    uniform(2**64 - 1, 2**40)


def test_fresh_seeds_differ() -> None:
    assert len({fresh_seed() for _ in range(20)}) == 20


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = np.array([-1.0, 3.0, 2.0, 3.0, -np.inf], np.float32)
    assert sample(logits, Sampling(), 0, 0) == 1
    assert sample(np.array([-0.0, 0.0], np.float32), Sampling(), 0, 0) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[1.0, np.nan, 2.0], [np.inf, 1.0, 2.0], [-np.inf, -np.inf, -np.inf]])
def test_logits_without_a_distribution_are_refused(row: list[float], temperature: float) -> None:
    with pytest.raises(KernelError, match="no distribution"):
        sample(np.array(row, np.float32), Sampling(temperature=temperature), 0, 0)


def by_definition(logits: np.ndarray, sampling: Sampling, seed: int, index: int) -> tuple[int, float]:
    """The first id whose cumulative probability exceeds the uniform, and how near the draw is to a border."""
    mass = np.cumsum(distribution(logits, sampling))
    u = uniform(seed, index)
    return int(np.searchsorted(mass, u, side="right")), float(np.abs(mass - u).min())


SETTINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0, 1e4]),
    top_k=st.sampled_from([None, 0, 1, 2, 17, 400, 10**6]),
    top_p=st.sampled_from([None, 1e-9, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([None, 0.0, 0.02, 0.5, 1.0]),
)


@given(
    size=st.sampled_from([1, 2, 63, 511, 512, 513, 5000]),
    spread=st.sampled_from([0.0, 0.5, 4.0]),
    levels=st.sampled_from([None, 3]),
    sampling=SETTINGS,
    seed=st.integers(0, 2**64 - 1),
)
@example(size=5000, spread=4.0, levels=3, sampling=Sampling(temperature=1.0, top_k=17), seed=1)
@example(size=5000, spread=0.0, levels=None, sampling=Sampling(temperature=1.0, top_k=400, top_p=0.9), seed=1)
@example(size=5000, spread=0.5, levels=None, sampling=Sampling(temperature=1.0, top_p=0.999), seed=1)
def test_short_cuts_draw_what_the_definition_draws(
    size: int, spread: float, levels: int | None, sampling: Sampling, seed: int
) -> None:
    logits = np.random.default_rng(seed).standard_normal(size).astype(np.float32) * np.float32(spread)
    if levels is not None:
        logits = np.round(logits * levels) / np.float32(levels)  # many ties
    logits[size // 2] = -np.inf if size > 1 else 0
    for index in range(20):
        expected, margin = by_definition(logits, sampling, seed, index)
        if margin > BORDER:
            assert sample(logits, sampling, seed, index) == expected


def test_order_of_the_settings() -> None:
    logits = np.log(np.array([0.05, 0.4, 0.3, 0.15, 0.1], np.float32))
    kept = {
        "top_k of equals keeps the lowest ids": (np.zeros(5, np.float32), {"top_k": 2}, [0, 1]),
        "top_p reaches its share with the last kept": (logits, {"top_p": 0.69}, [1, 2]),
        "top_p counts within top_k": (logits, {"top_k": 2, "top_p": 0.56}, [1]),
        "min_p is relative to the likeliest": (logits, {"min_p": 0.3}, [1, 2, 3]),
        "everything": (logits, {}, [0, 1, 2, 3, 4]),
    }
    for why, (row, settings, ids) in kept.items():
        sampling = Sampling(temperature=1.0, **settings)
        drawn = {sample(row, sampling, 5, index) for index in range(300)}
        assert sorted(drawn) == ids, why
        assert np.flatnonzero(distribution(row, sampling)).tolist() == ids, why


def test_temperature_comes_before_top_p() -> None:
    logits = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    cool = distribution(logits, Sampling(temperature=0.5, top_p=0.75))  # squares: 0.36 0.09 0.01 of 0.46
    assert np.flatnonzero(cool).tolist() == [0]
    assert np.flatnonzero(distribution(logits, Sampling(temperature=1.0, top_p=0.75))).tolist() == [0, 1]


def test_frequencies_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    draws = [sample(logits, Sampling(temperature=1.0), 11, index) for index in range(4000)]
    counts = np.bincount(draws, minlength=4) / 4000
    assert np.abs(counts - [0.5, 0.25, 0.125, 0.125]).max() < 0.03


def test_a_token_without_probability_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.full(1200, -np.inf, np.float32)
    logits[700] = 1
    for u in (0.0, 0.5, 1 - 2.0**-53):
        monkeypatch.setattr("kvist.engine.sampler.uniform", lambda seed, index, u=u: u)
        assert sample(logits, Sampling(temperature=1.0), 0, 0) == 700
        assert sample(logits[600:800], Sampling(temperature=1.0), 0, 0) == 100


def test_rows_are_not_changed() -> None:
    logits = np.random.default_rng(0).standard_normal(900).astype(np.float32)
    before = logits.copy()
    sample(logits, Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05), 1, 2)
    assert np.array_equal(logits, before)
