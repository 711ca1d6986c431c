"""engine/engine: the loop, over a decoder that reads what it stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvist.base.errors import KernelError, UsageError
from kvist.engine.engine import Engine, EngineSettings, Output
from kvist.engine.request import FinishReason, Sampling, Status
from kvist.engine.sampler import sample
from kvist.engine.scheduler import SchedulerSettings
from reading_decoder import World, greedy, predict

PROMPTS = [[1, 2, 3], [4], list(range(20)), [7, 7, 7, 7, 7], [9, 8, 7, 6, 5, 4, 3, 2]]
WINDOWS = [(None,), (6,), (None, 6), (3, None, 9)]


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("max_tokens", [1, 3, 16])
@pytest.mark.parametrize("cache", [True, False])
def test_any_batch_any_chunk_cached_or_not(windows: tuple[int | None, ...], max_tokens: int, cache: bool) -> None:
    world = World(windows, max_tokens=max_tokens, max_num_seqs=min(4, max_tokens), cache=cache)
    assert world.run(*PROMPTS, max_tokens=9) == [greedy(prompt, 9, windows) for prompt in PROMPTS]
    assert world.free == [64] * len(windows)


def test_the_decoder_notices_a_wrong_slot() -> None:
    """The instrument of all these tests, tried on a planted fault."""
    world = World()
    request = world.submit(range(9), 9)
    world.engine.step()
    world.decoder.memory[0][2] = 60
    world.drain()
    assert request.generated[0] == greedy(range(9), 1)[0]
    assert request.generated != greedy(range(9), 9)


def test_a_neighbour_or_the_batch_never_changes_a_draw() -> None:
    def draws(*prompts: list[int], **settings: object) -> list[list[int]]:
        return World(**settings).run(*prompts, max_tokens=12, temperature=1.0, top_p=0.9, seed=42)  # type: ignore[arg-type]

    together = draws(*PROMPTS)
    assert together == [draws(prompt)[0] for prompt in PROMPTS]
    assert together == draws(*PROMPTS[::-1])[::-1]
    assert together == draws(*PROMPTS, max_tokens=3, max_num_seqs=2)
    assert together == draws(*PROMPTS, cache=False)
    assert together != World().run(*PROMPTS, max_tokens=12, temperature=1.0, top_p=0.9, seed=43)


def test_each_draw_uses_the_uniform_of_its_index() -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=42, max_tokens=12)
    ids = [1, 2, 3]
    for index in range(12):
        ids.append(sample(predict(ids, (None,)), sampling, 42, index))
    assert World().run([1, 2, 3], max_tokens=12, temperature=1.0, top_p=0.9, seed=42) == [ids[3:]]


def test_a_missing_seed_is_drawn_and_reported() -> None:
    world = World()
    first, second = (world.submit([1, 2], 8, temperature=1.0) for _ in range(2))
    world.drain()
    assert first.seed != second.seed
    assert World().run([1, 2], max_tokens=8, temperature=1.0, seed=first.seed) == [first.generated]


def test_end_tokens_end_unless_ignored() -> None:
    expected = greedy([1, 2, 3], 8)
    eos = (expected[3], expected[5])
    world = World(eos=eos)
    stopped, ignoring = world.submit([1, 2, 3], 8), world.submit([1, 2, 3], 8, ignore_eos=True)
    world.drain()
    assert stopped.generated == expected[:4]
    assert stopped.finish_reason is FinishReason.STOP
    assert ignoring.generated == expected
    assert ignoring.finish_reason is FinishReason.LENGTH


def test_projections_are_counted_as_the_theory_says() -> None:
    cached, bare = World(), World(cache=False)
    for world in (cached, bare):
        request = world.submit([1], 6)
        world.drain()
        assert request.projections_without_cache == 21  # 1 + 2 + ... + 6
        assert request.projections == (6 if world is cached else 21)
    prompts = [[1, 2, 3], list(range(30))]
    for world in (World(max_tokens=4, max_num_seqs=4), World(max_tokens=4, max_num_seqs=4, cache=False)):
        world.run(*prompts, max_tokens=7)
        bare_work = sum(len(prompt) + i for prompt in prompts for i in range(7))
        assert world.engine.metrics.projections_without_cache == bare_work
        with_cache = sum(len(prompt) + 6 for prompt in prompts)
        assert world.engine.metrics.projections == (with_cache if world.engine.settings.cache else bare_work)
        assert world.engine.metrics.projections == sum(len(step.tokens) for step in world.decoder.steps)


def test_metrics_and_timings() -> None:
    world = World(max_num_seqs=1)
    ticks = iter(range(1000))
    world.engine.metrics.clock = lambda: float(next(ticks))
    first, second = world.submit([1, 2], 3), world.submit([3], 2)
    world.drain()
    metrics = world.engine.metrics
    assert (metrics.prompt_tokens, metrics.generated_tokens) == (3, 5)
    assert metrics.finished == {"length": 2}
    assert metrics.steps == 5
    for request in (first, second):
        timing = request.timing
        marks = [timing.submitted, timing.started, timing.first_token, timing.last_token, timing.ended]
        assert all(mark is not None for mark in marks)
        assert marks == sorted(marks)  # type: ignore[type-var]
    assert second.timing.ttft_s > second.timing.prefill_s > 0  # type: ignore[operator]  # it queued first
    assert first.timing.decode_s > 0  # type: ignore[operator]


def test_outputs_and_status() -> None:
    world = World()
    request = world.submit([1, 2, 3], 2)
    tokens = greedy([1, 2, 3], 2)
    assert request.status is Status.WAITING
    assert world.engine.step() == (Output(request.id, tokens[0], None),)
    assert request.status is Status.RUNNING
    assert world.engine.step() == (Output(request.id, tokens[1], FinishReason.LENGTH),)
    assert request.status is Status.FINISHED
    assert world.engine.idle
    assert world.engine.step() == ()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_logits_end_one_request_and_no_other(value: float) -> None:
    world = World()
    healthy, ill = world.submit([1, 2, 3], 5), world.submit([4, 5], 5)
    world.engine.step()
    world.decoder.spoil = (1, value)
    assert world.engine.step()[1] == Output(ill.id, None, FinishReason.ERROR)
    world.decoder.spoil = None
    world.drain()
    assert healthy.generated == greedy([1, 2, 3], 5)
    assert len(ill.generated) == 1
    assert "no distribution" in str(ill.error)
    assert world.free == [64]


def test_a_window_group_lives_in_the_blocks_that_the_formula_says() -> None:
    world = World((None, 6), num_blocks=40, ctx_size=150, max_tokens=5, max_num_seqs=5)
    request = world.submit(range(60), 60)
    most = 0
    while not request.finished:
        world.engine.step()
        most = max(most, world.pools[1].num_used)
    assert request.generated == greedy(range(60), 60, (None, 6))
    # 6 - 1 + 5 positions wherever blocks of 4 begin; after give_back at most two blocks hold the window.
    assert world.groups[1].blocks_for(119, 5) == 4
    assert 0 < most <= 4


def test_a_decoder_that_breaks_its_contract_is_named() -> None:
    world = World()

    class Wrong:
        max_tokens = 16

        def forward(self, step: object) -> torch.Tensor:
            return torch.zeros(3, 5)

    engine = Engine(Wrong(), world.groups, world.pools, world.engine.settings)
    engine.submit([1], world.submit([1]).sampling)
    with pytest.raises(KernelError, match=r"\[3, 5\] for 1 wanted rows"):
        engine.step()


def test_a_step_wider_than_the_decoder_is_refused() -> None:
    world = World(max_tokens=16)
    with pytest.raises(UsageError, match="a step of 17 tokens does not fit the decoder's 16"):
        Engine(world.decoder, world.groups, world.pools, EngineSettings(SchedulerSettings(64, 17, 4)))


def test_predict_agrees_with_itself_on_windows() -> None:
    assert not np.array_equal(predict([1, 2, 3], [2]), predict([1, 2, 3], [None]))
    assert np.array_equal(predict([9, 2, 3], [2]), predict([1, 2, 3], [2]))
