"""What the scripts share: draws, sums in index order, rotation, comparisons, and the timer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import kvist
import letters
from family_configs import CONFIGS, random_model
from kvist.base.errors import TooLong, UsageError
from kvist.learn import Generator, StepTimer, close, product, prose, rotate, same_bits, sentence, softmax
from kvist.verify.compare import PATHS, POINTWISE, assert_bits_equal, assert_close


def test_the_generator_is_the_c_runtimes() -> None:
    generator = Generator(42)
    # The first values of rand() after srand(42).
    drawn = [round((generator.draw(1.0) + 1) / 2 * 32767) for _ in range(5)]
    assert drawn == [175, 400, 17869, 30056, 16083]
    first, second = Generator().matrices(2, 2, 3, 0.5)
    flat = Generator().vector(12, 0.5)
    assert torch.equal(first.flatten(), flat[::2]) and torch.equal(second.flatten(), flat[1::2])


def test_a_product_never_depends_on_the_rows_beside_it() -> None:
    w, x = torch.randn(40, 300), torch.randn(65, 300)
    together = product(w, x)
    for t in (0, 7, 64):
        assert_bits_equal(product(w, x[t]), together[t])
    assert_close(together.double(), x.double() @ w.double().T, POINTWISE)


def test_softmax_sums_to_one_and_survives_large_scores() -> None:
    p = softmax(torch.tensor([1000.0, 999.0, -1000.0]))
    assert_close(p, torch.tensor([1 / (1 + math.exp(-1)), 1 / (1 + math.e), 0.0]), POINTWISE)
    assert_bits_equal(softmax(torch.tensor([3.0])), torch.ones(1))


def test_rotation_keeps_length_and_sees_only_distance() -> None:
    q, k = torch.randn(2, 16)
    assert_bits_equal(rotate(q, 0), q)
    assert_close(rotate(q, 1000).norm(), q.norm(), POINTWISE)
    dots = [float(rotate(q, at + 5) @ rotate(k, at)) for at in (0, 3, 40)]
    assert max(dots) - min(dots) <= PATHS * float(q.norm() * k.norm())
    rows = torch.randn(3, 2, 8)
    turned = rotate(rows.transpose(0, 1), torch.tensor([4, 0, 9]))
    assert_bits_equal(turned[1, 2], rotate(rows[2, 1], 9))
    with pytest.raises(UsageError, match="a width of 7 is odd"):
        rotate(torch.zeros(7), 1)


def test_bits_and_closeness() -> None:
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(3))
    assert close(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert close(torch.ones(1), torch.ones(1) + 1e-7)
    assert not close(torch.ones(1), torch.ones(1) + 1e-4)
    assert not close(torch.zeros(2), torch.zeros(3))


def test_sentence_and_prose() -> None:
    assert [word for word, _ in sentence()] == ["The", "cat", "sat", "on", "the", "mat"]
    assert torch.equal(sentence(width=4)[3][1], sentence()[3][1][:4])
    assert len(prose()) > 100_000


def test_names_are_offered() -> None:
    for name in kvist.learn.__all__:
        assert getattr(kvist.learn, name).__doc__
    with pytest.raises(AttributeError, match="it offers Generator, StepTimer"):
        kvist.learn.teach  # noqa: B018


def test_timed_steps_are_the_engines_steps(small_model: Path) -> None:
    """Operation by operation or in one call, in one chunk or in many: the same bits, and the engine's own token."""
    ticks = iter(range(10**6))
    timer = StepTimer(str(small_model), ctx_size=200, step_tokens=64, clock=lambda: float(next(ticks)))
    seconds = timer.feed(40)
    # Two ticks for each operation: one second each.
    assert seconds == {"projections": 4.0, "attention": 2.0, "feed forward": 4.0, "head and rest": 4.0}
    assert timer.length == 40
    alone = timer.logits
    timer.back(40)
    assert timer.feed_whole(33) == 1.0
    for _ in range(7):
        timer.feed()
    assert_bits_equal(timer.logits, alone)
    with kvist.load(small_model, ctx_size=200) as llm:
        ids = llm.tokenizer.encode(prose()[:2400])[:40]
        assert llm.generate([ids], max_tokens=1)[0].ids == (int(alone.argmax()),)


def test_latents_and_experts_have_their_places_in_a_step(tmp_path: Path) -> None:
    random_model(CONFIGS["deepseek_v3"]()).save_pretrained(tmp_path)
    ticks = iter(range(10**6))
    timer = StepTimer(str(letters.save(tmp_path)), ctx_size=100, step_tokens=64, clock=lambda: float(next(ticks)))
    # Three layers: latents, queries, absorb, values and o; one attention; two of a dense feed forward, or seven of a
    # router, its route, experts up and down and their sum, and the shared one's two. Embed, append, head: the rest.
    assert timer.feed(20) == {"projections": 15.0, "attention": 3.0, "feed forward": 16.0, "head and rest": 5.0}


def test_a_timer_refuses_what_does_not_fit(small_model: Path) -> None:
    with pytest.raises(UsageError, match="ctx_size is 9000, but this model was made for 1 to 8192"):
        StepTimer(str(small_model), ctx_size=9000)
    timer = StepTimer(str(small_model), ctx_size=70, step_tokens=64)
    with pytest.raises(TooLong, match="use 1 to 64"):
        timer.feed(65)
    timer.feed(60)
    with pytest.raises(TooLong, match=r"60 \+ 11 tokens exceed the context of 70"):
        timer.feed(11)
    assert timer.length == 60
