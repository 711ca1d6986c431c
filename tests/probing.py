"""Every logit of a loaded model: steps of any shape through the decoder and the pool that ``kvist.load`` made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvist.cache.table import GONE, Table
from kvist.compose import LLM
from kvist.kernels.ops import Step
from kvist.model.decoder import Decoder


class Probe:
    """One request of an idle engine: its tokens are fed in steps of the caller's choice."""

    def __init__(self, llm: LLM, tokens: Sequence[int]) -> None:
        decoder = llm.engine._runner.decoder
        assert isinstance(decoder, Decoder)
        assert llm.engine.idle
        llm.engine.forget()  # what finished requests left stands on blocks that are wanted here
        self.decoder = decoder
        self.tokens = list(tokens)
        self.table = Table(llm.engine.groups, llm.engine.pools)

    @property
    def left(self) -> int:
        return len(self.tokens) - self.table.written


def feed(parts: Sequence[tuple[Probe, int]]) -> Iterator[tuple[Probe, int, Tensor]]:
    """One step over the next ``n`` tokens of each probe: (probe, first position, logits [R, vocab]) piece by piece.

    Logits are views that the next piece overwrites: of a large vocabulary there is never more than one piece.
    """
    decoder = parts[0][0].decoder
    tokens: list[int] = []
    positions: list[int] = []
    starts = [0]
    for probe, n in parts:
        at = probe.table.written
        probe.table.extend(n)
        tokens += probe.tokens[at : at + n]
        positions += range(at, at + n)
        starts.append(len(tokens))
    tables = []
    for group in parts[0][0].table.groups:
        entries = [probe.table.entries(group.index) for probe, _ in parts]
        width = max(map(len, entries))
        tables.append(torch.tensor([[*row, *[GONE] * (width - len(row))] for row in entries], dtype=torch.int32))
    step = Step(ints(tokens), ints(positions), ints(starts), tuple(tables), ints([]))
    decoder.forward(step)
    for (probe, n), start in zip(parts, starts, strict=False):
        at = probe.table.written
        probe.table.commit(n)
        probe.table.give_back()
        for first in range(0, n, decoder.max_rows):
            rows = ints(range(start + first, start + min(n, first + decoder.max_rows)))
            yield probe, at + first, decoder.logits(Step(step.tokens, step.positions, step.starts, step.tables, rows))


def pieces(llm: LLM, tokens: Sequence[int], chunk: int) -> Iterator[tuple[int, Tensor]]:
    """(first position, logits [R, vocab]) of ``tokens``, fed alone in steps of ``chunk``."""
    probe = Probe(llm, tokens)
    try:
        while probe.left:
            for _, at, logits in feed([(probe, min(chunk, probe.left))]):
                yield at, logits
    finally:
        probe.table.release()


def all_logits(llm: LLM, tokens: Sequence[int], chunk: int) -> Tensor:
    """Logits [T, vocab] of ``tokens``, fed alone in steps of ``chunk``."""
    return torch.cat([logits.clone() for _, logits in pieces(llm, tokens, chunk)])


def ints(values: Sequence[int] | range) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
