"""kvist's own pool: the same groups and the same sums that the pool allocates with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvist.base.dtypes import DType, parse_dtype
from kvist.base.errors import UsageError
from kvist.cache.addressing import Paged
from kvist.cache.layout import Group, Layout
from kvist.cache.rows import KeyValue, Latent, Rows
from kvist.cache.sizing import blocks_for, context_bytes, step_tokens
from kvist.plan.cost import LayerKind, Widths, kinds_of, per_rank
from kvist.plan.sizes import show_count
from kvist.spec.kept import CacheLayer, CacheSpec, KeyValueRows, LatentRows, Part


@dataclass(frozen=True, slots=True)
class KvistEngine:
    """``groups`` as ``cache.layout.groups_of`` makes them; ``loose`` and ``fixed`` are what a block cannot hold."""

    kinds: tuple[LayerKind, ...]
    groups: tuple[Group, ...]
    fixed: int
    loose: tuple[LayerKind, ...]
    name: str = "kvist"

    def allocated(self, ctx: int, sequences: int) -> int:
        """Bytes of the pool for ``sequences`` requests of ``ctx`` tokens, plus states."""
        paged = context_bytes(self.groups, ctx, step_tokens(ctx, sequences), sequences)
        return paged + sequences * (self.fixed + sum(kind.nbytes(ctx) for kind in self.loose))

    def explain(self, ctx: int, sequences: int) -> tuple[str, ...]:
        """Blocks of each table times their bytes."""
        chunk = step_tokens(ctx, sequences)
        lines = [
            f"{len(group.layers)} layers x {blocks} blocks x {show_count(group.layout.block_bytes)} B"
            f" = {show_count(len(group.layers) * blocks * group.layout.block_bytes)} B"
            + (f"  (window {group.window}, steps of up to {chunk} tokens)" if group.window else "")
            for group, blocks in zip(self.groups, blocks_for(self.groups, ctx, chunk, sequences), strict=True)
        ]
        if self.fixed:
            lines.append(f"{sequences} x {show_count(self.fixed)} B of states and fixed rows")
        return tuple(lines)


def kvist_engine(
    spec: CacheSpec, dtype: str, widths: Widths, block_size: int, ranks: int = 1, source_tokens: int | None = None
) -> KvistEngine:
    """The engine for ``spec`` with a cache of ``dtype``. UsageError for several ranks: kvist runs on one machine."""
    if ranks != 1:
        raise UsageError(f"kvist runs on one rank; --tensor-parallel {ranks} needs another --engine")
    element = parse_dtype(dtype)
    members: dict[tuple[Rows, int | None], list[int]] = {}
    rest: list[CacheLayer] = []
    for index, layer in enumerate(spec.layers):
        loose: list[Part] = []
        for part in per_rank(layer.parts, 1):
            rows = _rows(part)
            if rows is None:
                loose.append(part)
            else:
                window = part.window if isinstance(part, KeyValueRows) else None
                members.setdefault((rows, window), []).append(index)
        if loose:
            rest.append(CacheLayer(layer.kind, tuple(loose)))
    groups = _groups(members, element, block_size)
    others = kinds_of(rest, widths, 1, source_tokens)
    return KvistEngine(
        kinds=kinds_of(spec.layers, widths, 1, source_tokens),
        groups=groups,
        fixed=sum(kind.fixed for kind in others),
        loose=tuple(_without_fixed(kind) for kind in others),
    )


def _groups(members: dict[tuple[Rows, int | None], list[int]], dtype: DType, block_size: int) -> tuple[Group, ...]:
    return tuple(
        Group(index, tuple(layers), Layout(rows, dtype, Paged(block_size)), window)
        for index, ((rows, window), layers) in enumerate(members.items())
    )


def _rows(part: Part) -> Rows | None:
    """The pool's row for ``part``; None for what it has no block format for (states, chunks, compressed rows)."""
    if isinstance(part, KeyValueRows) and part.chunk is None:
        return KeyValue(part.num_kv_heads, part.head_dim, part.v_head_dim)
    return Latent(part.kv_lora_rank, part.qk_rope_head_dim) if isinstance(part, LatentRows) else None


def _without_fixed(kind: LayerKind) -> LayerKind:
    return replace(kind, pieces=tuple(replace(piece, fixed=0) for piece in kind.pieces))
