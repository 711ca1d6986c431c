"""SGLang's pools: token slots in pages, a second pool for windows sized by a ratio, state slots per running request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvist.plan.cost import LayerKind, Widths, kinds_of
from kvist.plan.sizes import show_count
from kvist.spec.kept import CacheSpec


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """The flags that change sizes. ``spare_pages``: pages kept beside the usable ones."""

    page_size: int = 1
    tensor_parallel: int = 1
    swa_full_tokens_ratio: float = 0.8
    spare_pages: int = 1


@dataclass(frozen=True, slots=True)
class SglangEngine:
    """``full`` and ``windowed`` bytes per slot on one rank; ``fixed`` bytes per running request."""

    kinds: tuple[LayerKind, ...]
    full: int
    windowed: int
    fixed: int
    settings: SglangSettings
    name: str = "sglang"

    @property
    def cell(self) -> float:
        """Bytes of one token slot in both pools, as the memory is shared out."""
        return self.full + self.settings.swa_full_tokens_ratio * self.windowed

    def pool_bytes(self, tokens: int) -> int:
        """Bytes of the pools with ``tokens`` slots, the spare page included."""
        slots = tokens + self.settings.spare_pages * self.settings.page_size
        windowed = int(slots * self.settings.swa_full_tokens_ratio) if self.windowed else 0
        return slots * self.full + windowed * self.windowed

    def allocated(self, ctx: int, sequences: int) -> int:
        """Bytes on one rank for ``sequences`` requests of ``ctx`` tokens."""
        page = self.settings.page_size
        return self.pool_bytes(-(-ctx // page) * page * sequences) + sequences * self.fixed

    def explain(self, ctx: int, sequences: int) -> tuple[str, ...]:
        """Slots and bytes of each pool."""
        page = self.settings.page_size
        tokens = -(-ctx // page) * page * sequences
        lines = [f"{show_count(tokens)} slots + {page} spare, {show_count(self.full)} B each"]
        if self.windowed:
            ratio = self.settings.swa_full_tokens_ratio
            lines.append(f"window pool: {ratio:g} of the slots, {show_count(self.windowed)} B each")
        if self.fixed:
            lines.append(f"{sequences} state slots x {show_count(self.fixed)} B")
        return tuple(lines)


def sglang_engine(
    spec: CacheSpec, widths: Widths, settings: SglangSettings, source_tokens: int | None = None
) -> SglangEngine:
    """The pools that SGLang would make for ``spec``."""
    kinds = kinds_of(spec.layers, widths, settings.tensor_parallel, source_tokens)
    full = math.ceil(sum(kind.growing + kind.index for kind in kinds))
    windowed = sum(kind.windowed for kind in kinds)
    if not full:
        # Only windows: there is one pool, and it is not bounded.
        full, windowed = windowed, 0
    return SglangEngine(kinds, full, windowed, sum(kind.fixed for kind in kinds), settings)
