"""engine/scheduler: who runs, in plain integers."""

from __future__ import annotations

import pytest

from kvist.base.errors import TooLong, UsageError
from kvist.engine.metrics import Timing
from kvist.engine.request import Request, Sampling
from kvist.engine.scheduler import Chunk, Scheduler, SchedulerSettings, StepPlan


def need(tokens: int) -> tuple[int, ...]:
    """Blocks of 4 in one group."""
    return (-(-tokens // 4),)


class Queue:
    """A scheduler, and a commit that does no more than move counts."""

    def __init__(self, blocks: int = 100, *, ctx_size: int = 100, max_tokens: int = 8, max_num_seqs: int = 4) -> None:
        self.scheduler = Scheduler(SchedulerSettings(ctx_size, max_tokens, max_num_seqs), (blocks,), need)
        self.requests: dict[int, Request] = {}

    def add(self, prompt: int, max_tokens: int | None = 3) -> Request:
        max_new = self.scheduler.limit(prompt, max_tokens)
        request = Request(len(self.requests), (1,) * prompt, Sampling(), 0, max_new, frozenset(), Timing(0.0))
        self.requests[request.id] = request
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        for chunk in plan.chunks:
            request = self.requests[chunk.request_id]
            request.written = chunk.stop
            if chunk.sample:
                request.generated.append(0)
                if len(request.generated) == request.max_new:
                    self.scheduler.remove(request)
        return plan

    def chunks(self) -> list[tuple[int, int, int, bool]]:
        return [(c.request_id, c.start, c.stop, c.sample) for c in self.step().chunks]


def test_decodes_first_then_prefill_in_order_under_the_budget() -> None:
    queue = Queue()
    queue.add(3, max_tokens=9)
    queue.add(13)
    queue.add(6)
    assert queue.chunks() == [(0, 0, 3, True), (1, 0, 5, False)]
    assert queue.chunks() == [(0, 3, 4, True), (1, 5, 12, False)]
    assert queue.chunks() == [(0, 4, 5, True), (1, 12, 13, True), (2, 0, 6, True)]
    assert queue.chunks() == [(0, 5, 6, True), (1, 13, 14, True), (2, 6, 7, True)]


def test_one_token_to_go_is_served_before_an_older_prefill() -> None:
    queue = Queue(max_tokens=8)
    old, new = queue.add(4, max_tokens=9), queue.add(2, max_tokens=9)
    assert queue.chunks() == [(0, 0, 4, True), (1, 0, 2, True)]
    old.generated.extend([0] * 7)
    old.written = 0  # as after its cache was thrown away: 12 tokens to recompute
    assert queue.chunks() == [(1, 2, 3, True), (0, 0, 7, False)]
    assert (old.length - old.written, new.length - new.written) == (5, 1)


def test_chunks_add_up_to_the_prompt_once_and_no_step_exceeds_the_budget() -> None:
    queue = Queue(max_tokens=5, max_num_seqs=3)
    for prompt in (17, 1, 4, 9, 5, 6):
        queue.add(prompt, max_tokens=4)
    seen: dict[int, int] = dict.fromkeys(queue.requests, 0)
    for _ in range(200):
        plan = queue.step()
        assert plan.num_tokens <= 5
        if not plan.chunks:
            break
        for chunk in plan.chunks:
            assert chunk.start == seen[chunk.request_id]
            seen[chunk.request_id] = chunk.stop
    # The last token of each request is sampled and never fed.
    assert seen == {i: len(r.prompt_ids) + 3 for i, r in queue.requests.items()}
    assert queue.scheduler.promised == (0,)


def test_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    queue = Queue(blocks=5, ctx_size=20)
    queue.add(8, max_tokens=5)  # 12 stored tokens: 3 blocks
    queue.add(10, max_tokens=3)  # 3 blocks, 2 are left
    queue.add(2, max_tokens=2)  # 1 block
    plan = queue.step()
    assert plan.admitted == (0,)
    assert plan.waiting == "the step's budget of 8 tokens is used up"
    plan = queue.step()
    assert plan.waiting == "request 1 needs 3 blocks of group 0, 2 are not promised to others"
    for _ in range(4):
        plan = queue.step()
    assert plan.admitted == (1,)


def test_a_promise_covers_the_whole_life() -> None:
    queue = Queue(blocks=4, ctx_size=16)
    queue.add(2, max_tokens=8)  # 9 stored tokens: 3 blocks, though its prompt takes one
    queue.add(2, max_tokens=4)  # 2 blocks
    queue.step()
    assert queue.scheduler.promised == (3,)
    assert queue.scheduler.num_running == 1
    assert queue.scheduler.num_waiting == 1


def test_places_are_a_limit_of_their_own() -> None:
    queue = Queue(max_num_seqs=2)
    for _ in range(3):
        queue.add(1, max_tokens=3)
    assert queue.step().waiting == "all 2 places are taken (max_num_seqs)"


def test_idle_says_why() -> None:
    queue = Queue()
    assert queue.step() == StepPlan(idle="no request is waiting or running")
    request = queue.add(3)
    queue.scheduler.remove(request)
    assert queue.step().idle == "no request is waiting or running"


def test_removing_frees_the_promise_once() -> None:
    queue = Queue()
    request = queue.add(6)
    queue.step()
    assert queue.scheduler.promised == need(8)
    queue.scheduler.remove(request)
    queue.scheduler.remove(request)
    assert queue.scheduler.promised == (0,)


def test_planning_twice_gives_the_same_plan() -> None:
    queue = Queue()
    queue.add(20)
    queue.add(3)
    first = queue.scheduler.plan()
    again = queue.scheduler.plan()
    assert first.chunks == again.chunks == (Chunk(0, 0, 8, False),)
    assert again.admitted == ()


def test_several_groups_are_promised_together() -> None:
    scheduler = Scheduler(SchedulerSettings(64, 8, 4), (10, 3), lambda n: (-(-n // 4), min(-(-n // 4), 2)))
    for i in range(2):
        scheduler.add(Request(i, (1,) * 9, Sampling(), 0, 4, frozenset(), Timing(0.0)))
    assert scheduler.plan().admitted == (0,)
    scheduler._running[0].written = 9
    scheduler._running[0].generated.append(0)
    assert scheduler.plan().waiting == "request 1 needs 2 blocks of group 1, 1 are not promised to others"
    assert scheduler.promised == (3, 2)


@pytest.mark.parametrize("prompt", [17, 100])
def test_a_prompt_that_never_fits_is_refused_with_both_numbers(prompt: int) -> None:
    with pytest.raises(TooLong, match=f"prompt has {prompt} tokens, the context holds 16"):
        Queue(ctx_size=16).scheduler.limit(prompt, 1)
    with pytest.raises(TooLong, match=rf"prompt has {prompt} tokens, the pool's blocks hold 16 .*ctx_size 90"):
        Queue(blocks=4, ctx_size=90).scheduler.limit(prompt, 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((0, 8, 4), "ctx_size is 0"),
        ((8, 0, 4), "max_tokens is 0"),
        ((8, 8, 0), "max_num_seqs is 0"),
        ((8, 4, 5), "lower max_num_seqs to 4"),
    ],
)
def test_settings_that_cannot_make_progress_are_refused(settings: tuple[int, int, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SchedulerSettings(*settings)


def test_a_pool_for_nobody_is_refused() -> None:
    with pytest.raises(UsageError, match="hold no token"):
        Scheduler(SchedulerSettings(16, 8, 4), (0,), need)
