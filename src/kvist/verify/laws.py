"""The laws, each on its paths: the same tokens must give the same bits whatever way they take through the cache.

Every path is compared with one baseline: all tokens in one step, alone, in an empty cache. A path proves that it ran
(it crossed splits, met neighbours, gave blocks back ...) or its row says "not exercised", which fails. Since a fault
can sit on both sides of such a comparison, one row compares by value with a judge that shares no code with the kernels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvist.kernels.ops import SPLIT
from kvist.spec.bounded import bounded
from kvist.spec.model import Attention, ModelSpec
from kvist.verify.course import Course, Lane, Subject, Tap
from kvist.verify.report import FirstDifference, LawRow

# Drives a course over the tokens and returns the lane under test.
Drive = Callable[[Course, Sequence[int]], Lane]
# Why a path did not do what its name says; None when it did.
Evidence = Callable[[Course, Lane], str | None]


@dataclass(frozen=True, slots=True)
class Path:
    """One way through the cache. ``settings`` go to the course; ``positions`` limits what is compared."""

    law: str
    name: str
    drive: Drive
    evidence: Evidence
    settings: dict[str, Any] = field(default_factory=dict)
    spec: Callable[[ModelSpec], ModelSpec] | None = None  # another function (a window): its own baseline


def whole(course: Course, tokens: Sequence[int]) -> Lane:
    """All tokens in one step."""
    lane = course.lane(tokens)
    course.feed([(lane, len(tokens))])
    return lane


def in_chunks(size: int) -> Drive:
    """``size`` tokens a step."""

    def drive(course: Course, tokens: Sequence[int]) -> Lane:
        lane = course.lane(tokens)
        course.run(lane, len(tokens), size)
        return lane

    return drive


def recomputed(positions: Sequence[int]) -> Drive:
    """For each position: an empty cache and all tokens up to it, as if nothing had been kept."""

    def drive(course: Course, tokens: Sequence[int]) -> Lane:
        answers = course.lane(tokens)
        for position in positions:
            lane = course.lane(tokens[: position + 1])
            course.feed([(lane, position + 1)])
            answers.digests[position] = lane.digests[position]
            lane.table.release()
        return answers

    return drive


def with_neighbours(seed: int, lanes: int) -> Drive:
    """In batches whose other members, their order and the chunks of all change from step to step."""

    def drive(course: Course, tokens: Sequence[int]) -> Lane:
        draw = random.Random(seed)
        lane = course.lane(tokens)
        others: list[Lane] = []
        while lane.table.written < len(tokens):
            others = [other for other in others if other.table.written < len(other.tokens)]
            while len(others) < lanes - 1:
                others.append(course.lane([draw.choice(tokens) for _ in range(draw.randint(1, len(tokens)))]))
            parts = [(lane, min(draw.randint(1, 60), len(tokens) - lane.table.written))]
            for other in draw.sample(others, draw.randint(1, len(others))):
                parts.append((other, min(draw.randint(1, 30), len(other.tokens) - other.table.written)))
            draw.shuffle(parts)
            course.feed(parts)
            for other in others:
                if other.table.written == len(other.tokens) or draw.random() < 0.1:
                    other.table.release()  # leaves, finished or aborted
            others = [other for other in others if other.table.written]
        return lane

    return drive


def wrong_turns(size: int) -> Drive:
    """Again and again: other tokens are fed, cut off, and the right ones continue."""

    def drive(course: Course, tokens: Sequence[int]) -> Lane:
        draw = random.Random(size)
        lane = course.lane(tokens)
        while lane.table.written < len(tokens):
            at = lane.table.written
            n = min(size, len(tokens) - at)
            right = lane.tokens[at : at + n]
            lane.tokens[at : at + n] = [draw.choice(tokens) for _ in range(n)]
            course.feed([(lane, n)])
            course.back_to(lane, at, size)
            lane.tokens[at : at + n] = right
            course.feed([(lane, n)])
        return lane

    return drive


def shared_beginning(course: Course, tokens: Sequence[int]) -> Lane:
    """Begins with the blocks of another request, then runs beside it and a third that shares them too."""
    half = max(1, len(tokens) // 2 // 64) * 64
    first = course.lane(tokens)
    course.run(first, half, 96, keep=False)
    lanes = [course.lane(tokens), course.lane([*tokens[:half], *reversed(tokens[half:])])]
    for lane in lanes:
        lane.table.begin_with(first.table, first.table.shareable(half))
    lane, other = lanes
    step = 1
    while lane.table.written < len(tokens):
        n = min(step, len(tokens) - lane.table.written)
        course.feed([(other, n), (first, n), (lane, n)])
        step = 1 if step == 3 else step + 1
    return lane


def shared_blocks(course: Course, lane: Lane) -> str | None:
    """A beginning that was not computed for this request."""
    missing = min(lane.digests, default=0)
    return None if missing >= 64 else "no block was shared"


def crossed_splits(course: Course, lane: Lane) -> str | None:
    """Several splits of keys, and several steps."""
    if lane.table.length and lane.table.length <= 2 * SPLIT:
        return f"{lane.table.length} tokens cross fewer than two splits of {SPLIT} keys"
    return None if course.steps > 1 else "everything ran in one step"


def met_neighbours(course: Course, lane: Lane) -> str | None:
    """Batches of more than one request."""
    return None if course.largest_batch > 1 else "no batch had more than one request"


def gave_back(course: Course, lane: Lane) -> str | None:
    """Blocks that fell out of a window while the request ran."""
    return None if lane.dropped else "no block fell out of a window: the text is too short"


def windowed(window: int) -> Callable[[ModelSpec], ModelSpec]:
    """The model with full-attention layers seen through a window: another function, the same weights."""

    def change(spec: ModelSpec) -> ModelSpec:
        layers = tuple(
            replace(layer, attention=replace(layer.attention, window=layer.attention.window or window))
            if isinstance(layer.attention, Attention)
            else layer
            for layer in spec.layers
        )
        return replace(spec, layers=layers)

    return change


def paths(spec: ModelSpec, length: int, *, full: bool) -> Iterator[Path]:
    """Every path that a model of this kind has, for texts of ``length`` tokens."""
    one = "path independence"
    spots = sorted({0, 1, SPLIT - 1, SPLIT, length // 2, length - 1})
    yield Path("cached = recomputed", "nothing kept", recomputed(spots), lambda c, lane: None)
    for size in (1, 7, 64, 256):
        yield Path(one, f"chunks of {size}" if size > 1 else "token by token", in_chunks(size), crossed_splits)
    for seed in range(3 if full else 1):
        settings = {"lanes": 4}
        yield Path(one, f"changing neighbours ({seed})", with_neighbours(seed, 4), met_neighbours, settings)
    for size in (16, 32, 128, 256):
        yield Path(one, f"blocks of {size}", in_chunks(100), crossed_splits, {"block_size": size})
    for threads in (1, 2, 3):
        yield Path(one, f"{threads} thread{'s' * (threads > 1)}", in_chunks(90), crossed_splits, {"threads": threads})
    yield Path(one, "shared beginning", shared_beginning, shared_blocks, {"lanes": 3})
    yield Path(one, "truncate and continue", wrong_turns(45), crossed_splits)
    attentions = [layer.attention for layer in spec.layers if isinstance(layer.attention, Attention)]
    if any(attention.window is not None and not attention.sinks for attention in attentions):
        small = {"block_size": 16, "step_tokens": 64}
        yield Path(one, "past the window", in_chunks(50), gave_back, small)
    if len(attentions) < len(spec.layers):
        return  # latents have no ring: nothing that was trained with them drops positions
    window = length // 3
    small = {"block_size": 16, "step_tokens": 64, "ring_chunk": 64}
    yield Path("ring = its mask", f"ring of {window} rows", in_chunks(48), gave_back, small, windowed(window))
    behind = f"ring of {window} rows behind 20 sinks"
    yield Path("ring = its mask", behind, in_chunks(48), gave_back, small, lambda spec: bounded(spec, window, 20))


class Laws:
    """Runs paths of one subject against their baselines over one text."""

    def __init__(self, subject: Subject, tokens: Sequence[int]) -> None:
        """Baselines are computed when first needed, and kept."""
        self.subject, self.tokens = subject, list(tokens)
        self._baselines: dict[ModelSpec, dict[int, bytes]] = {}

    def check(self, path: Path) -> LawRow:
        """Drive one path and compare it with its baseline at every position that it answered."""
        spec = path.spec(self.subject.spec) if path.spec else self.subject.spec
        expected = self._baseline(spec)
        course = self._course(path, spec)
        lane = path.drive(course, self.tokens)
        reason = path.evidence(course, lane)
        if not lane.digests:
            reason = "no position was answered"
        wrong = [p for p in sorted(lane.digests) if lane.digests[p] != expected[p]]
        if wrong:
            difference = self._locate(path, spec, wrong[0])
            return LawRow(path.law, path.name, len(lane.digests), False, difference)
        if reason is not None:
            return LawRow(path.law, path.name, len(lane.digests), None, detail=f"not exercised: {reason}")
        return LawRow(path.law, path.name, len(lane.digests), True)

    def baseline(self) -> dict[int, bytes]:
        """Digests of the logits of every position, in one step, alone."""
        return self._baseline(self.subject.spec)

    def _course(self, path: Path, spec: ModelSpec, tap: Tap | None = None) -> Course:
        settings = {"step_tokens": max(512, len(self.tokens)), **path.settings}
        return Course(self.subject, length=len(self.tokens), spec=spec, tap=tap, **settings)

    def _baseline(self, spec: ModelSpec) -> dict[int, bytes]:
        if spec not in self._baselines:
            course = Course(self.subject, length=len(self.tokens), spec=spec, step_tokens=len(self.tokens))
            self._baselines[spec] = whole(course, self.tokens).digests
        return self._baselines[spec]

    def _locate(self, path: Path, spec: ModelSpec, position: int) -> FirstDifference:
        """Run both paths again, looking at every operation's row for ``position``."""
        base = Course(
            self.subject, length=len(self.tokens), spec=spec, step_tokens=len(self.tokens), tap=Tap(0, position)
        )
        whole(base, self.tokens)
        course = self._course(path, spec, Tap(0, position))
        path.drive(course, self.tokens)
        if not course.seen:  # recomputed in lanes of their own: the lane of that position is the tapped one
            course = self._course(path, spec, Tap(1, position))
            recomputed([position])(course, self.tokens)
        return first_difference(base.seen, course.seen, position)


def first_difference(expected: list[Any], actual: list[Any], position: int) -> FirstDifference:
    """The first operation whose row differs in a bit, and how far apart the logits are in the end."""
    from kvist.verify.compare import bits_equal

    name = "cannot be reproduced: the two runs agreed when repeated"
    for (name_a, a), (_, b) in zip(expected, actual, strict=True):
        if not bits_equal(a, b):
            name = name_a
            break
    a, b = expected[-1][1].double(), actual[-1][1].double()
    words = name.split()
    layer = int(words[1]) if words[0] == "layer" else None
    operation = " ".join(words[2:]) if layer is not None else name
    return FirstDifference(position, layer, operation, float((a - b).abs().max()), int((a != b).sum()))
