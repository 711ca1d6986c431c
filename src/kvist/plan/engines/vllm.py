"""vLLM's pool: one page size for all groups of layers, whole blocks per request, state pages as large as attention's.

Modelled from its documented behaviour and from start-up lines of published runs; version differences are settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvist.base.errors import UsageError
from kvist.plan.cost import LayerKind, Piece, Widths, kinds_of, per_rank, piece, state_format
from kvist.plan.sizes import show_count
from kvist.spec.kept import CacheLayer, CacheSpec, StateRows


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """The flags that change sizes.

    ``checkpoints``: keep two state blocks per group for prefix caching (``--mamba-cache-mode align``) instead of one.
    ``alignment``: what the attention block of a hybrid is a multiple of. ``speculative_tokens`` and ``draft_layers``:
    multi-token prediction. ``decode_context_parallel`` shards latents over ranks.
    """

    block_size: int = 16
    max_num_batched_tokens: int = 8192
    tensor_parallel: int = 1
    decode_context_parallel: int = 1
    hybrid_manager: bool = True
    checkpoints: bool = True
    alignment: int = 16
    speculative_tokens: int = 0
    draft_layers: int = 0


@dataclass(frozen=True, slots=True)
class Sheet:
    """Layers that vLLM treats alike: ``kind`` full, swa, chunk or state; bytes of a page of ``block_size`` tokens."""

    kind: str
    count: int
    bound: int | None
    page: int
    block_size: int


@dataclass(frozen=True, slots=True)
class VllmEngine:
    """One block id is a page in each of ``group_size`` layers: ``block_bytes`` bytes on one rank."""

    kinds: tuple[LayerKind, ...]
    sheets: tuple[Sheet, ...]
    group_size: int
    block_bytes: int
    block_size: int
    settings: VllmSettings
    fixed: int = 0
    notes: tuple[str, ...] = field(default=())
    name: str = "vllm"

    def groups(self, sheet: Sheet) -> int:
        """Groups that the layers of ``sheet`` fill, the last one padded."""
        return -(-sheet.count // self.group_size)

    @property
    def num_groups(self) -> int:
        """Groups in all."""
        return sum(self.groups(sheet) for sheet in self.sheets)

    def blocks_of(self, sheet: Sheet, ctx: int) -> int:
        """Blocks that one request of ``ctx`` tokens holds in each group of ``sheet``."""
        settings = self.settings
        local = -(-ctx // settings.decode_context_parallel)
        if sheet.kind == "state":
            return (2 if settings.checkpoints else 1) + settings.speculative_tokens
        if sheet.bound is None:
            return -(-local // sheet.block_size)
        if sheet.kind == "chunk":
            return -(-min(sheet.bound + settings.max_num_batched_tokens, local) // sheet.block_size)
        return -(-min(sheet.bound - 1 + settings.max_num_batched_tokens, local) // sheet.block_size) + 1

    def blocks_per_request(self, ctx: int) -> int:
        """Block ids that one request of ``ctx`` tokens holds."""
        return sum(self.groups(sheet) * self.blocks_of(sheet, ctx) for sheet in self.sheets)

    def allocated(self, ctx: int, sequences: int) -> int:
        """Bytes on one rank for ``sequences`` requests of ``ctx`` tokens."""
        return sequences * (self.blocks_per_request(ctx) * self.block_bytes + self.fixed) if ctx > 0 else 0

    def num_blocks(self, available: int) -> int:
        """Block ids that ``available`` bytes hold."""
        return available // self.block_bytes

    def concurrency(self, available: int, max_model_len: int) -> float:
        """The start-up line's maximum concurrency."""
        return self.num_blocks(available) / self.blocks_per_request(max_model_len)

    def tokens(self, available: int, max_model_len: int) -> int:
        """The start-up line's cache size in tokens: concurrency times length for hybrids, blocks otherwise."""
        if len(self.sheets) == 1:
            per_block = self.block_size * self.settings.decode_context_parallel
            return self.num_blocks(available) * per_block
        return int(self.concurrency(available, max_model_len) * max_model_len)

    def tokens_by_groups(self, available: int) -> int:
        """The same line as older versions print it: blocks shared out over the groups, however few they need."""
        return self.num_blocks(available) // self.num_groups * self.block_size

    def estimated_max_len(self, available: int) -> int:
        """The longest length that the start-up error suggests: what is left after the states, in whole blocks."""
        rest = self.num_blocks(available)
        full = 0
        for sheet in self.sheets:
            if sheet.kind == "state":
                rest -= self.groups(sheet) * self.blocks_of(sheet, 1)
            else:
                full += self.groups(sheet)
        return max(0, rest) // max(1, full) * self.block_size

    def explain(self, ctx: int, sequences: int) -> tuple[str, ...]:
        """Groups, blocks and bytes."""
        lines = [
            f"{sheet.count} {sheet.kind} layers in {self.groups(sheet)} group(s) of {self.group_size}:"
            f" {self.blocks_of(sheet, ctx)} blocks of {sheet.block_size} tokens each"
            for sheet in self.sheets
        ]
        blocks = self.blocks_per_request(ctx)
        lines.append(
            f"{sequences} request(s) x {blocks} blocks x {show_count(self.block_bytes)} B"
            f" = {show_count(sequences * blocks * self.block_bytes)} B on each rank"
        )
        return (*lines, *self.notes)


def vllm_engine(
    spec: CacheSpec, widths: Widths, settings: VllmSettings, source_tokens: int | None = None
) -> VllmEngine:
    """The pool that vLLM would make for ``spec``. UsageError for numbers that it refuses."""
    layers = [*spec.layers]
    if settings.draft_layers:
        extra = spec.mtp_layer or next((la for la in reversed(layers) if la.kind in ("full", "mla")), None)
        if extra is None:
            raise UsageError(f"{spec.family} has no layer that a draft layer could copy")
        layers += [extra] * settings.draft_layers
    ranks = settings.tensor_parallel
    kinds = kinds_of(layers, widths, ranks, source_tokens)
    rows, states = _rows(layers, widths, settings)
    fixed = sum(
        kind.count * p.fixed for kind in kinds for p in kind.pieces if p.what == "K and V of the other sequence"
    )
    if not rows and not states:
        raise UsageError(f"{spec.family} keeps no cache: there is nothing for vLLM to allocate")
    if not settings.hybrid_manager:
        rows = _as_full(rows)
    block = settings.block_size
    if states:
        block = _hybrid_block(rows, states, settings) if rows else block
    sheets, note = _sheets(rows, states, block)
    return _assemble(kinds, sheets, settings, block, fixed, note)


_Key = tuple[str, int | None, int]


def _rows(
    layers: Iterable[CacheLayer], widths: Widths, settings: VllmSettings
) -> tuple[dict[_Key, int], dict[int, int]]:
    """Attention layers by (kind, bound, bytes per token), and state layers by page bytes."""
    rows: dict[_Key, int] = {}
    states: dict[int, int] = {}
    for layer in layers:
        # Bytes per token of this layer by bound: most layers have one, compressed attention has two.
        held_by: dict[int | None, int] = {}
        for part in per_rank(layer.parts, settings.tensor_parallel):
            if isinstance(part, StateRows):
                page = _state_page(part, widths, settings)
                states[page] = states.get(page, 0) + 1
                continue
            held: Piece = piece(part, widths)
            if held.per_token:
                held_by[held.bound] = held_by.get(held.bound, 0) + -(-held.per_token // held.stride)
        for bound, per_token in held_by.items():
            kind = "full" if bound is None else "chunk" if layer.kind == "chunk" else "swa"
            key = (kind, bound, per_token)
            rows[key] = rows.get(key, 0) + 1
    return rows, states


def _state_page(part: StateRows, widths: Widths, settings: VllmSettings) -> int:
    """Bytes of one layer's state; speculation lengthens the convolution's tail."""
    tail = part.conv_channels * (part.conv_kernel - 1 + settings.speculative_tokens) if part.conv_kernel > 1 else 0
    return state_format(part, widths).rows(1, part.state) + widths.conv.rows(1, tail)


def _as_full(rows: dict[_Key, int]) -> dict[_Key, int]:
    merged: dict[_Key, int] = {}
    for (_, _, per_token), count in rows.items():
        key = ("full", None, per_token)
        merged[key] = merged.get(key, 0) + count
    return merged


def _hybrid_block(rows: dict[_Key, int], states: dict[int, int], settings: VllmSettings) -> int:
    """Tokens of an attention block whose page is as large as a state's: a multiple of ``alignment``."""
    per_token = min(key[2] for key in rows)
    step = settings.alignment * per_token
    return max(settings.block_size, settings.alignment * -(-max(states) // step))


def _sheets(rows: dict[_Key, int], states: dict[int, int], block: int) -> tuple[list[Sheet], str | None]:
    """Pages made equal: layers with smaller pages get longer blocks; what cannot be made equal is charged in full."""
    if len({(kind, bound) for kind, bound, _ in rows}) == 1 and not states:
        # One type: layers of different widths share a block id, and their pages are summed.
        (kind, bound, _), count = next(iter(rows)), sum(rows.values())
        total = sum(per_token * n for (_, _, per_token), n in rows.items())
        return [Sheet(kind, count, bound, block * total, block)], None
    largest = max([block * per_token for _, _, per_token in rows] + ([] if rows else list(states)))
    note = None
    if any(largest % (block * per_token) for _, _, per_token in rows):
        note = "pages of different size cannot be made equal: windows are charged in full"
        rows = _as_full(rows)
        if not states:
            return _sheets(rows, states, block)[0], note
        largest = max(block * per_token for _, _, per_token in rows)
    sheets = [
        Sheet(kind, count, bound, largest, largest // per_token) for (kind, bound, per_token), count in rows.items()
    ]
    return sheets + [Sheet("state", count, None, largest, block) for count in states.values()], note


def _assemble(
    kinds: tuple[LayerKind, ...], sheets: list[Sheet], settings: VllmSettings, block: int, fixed: int, note: str | None
) -> VllmEngine:
    if len(sheets) == 1:
        sheet = sheets[0]
        # The page of a single sheet already counts all its layers.
        per_id = sheet.page if sheet.kind != "state" else sheet.page * sheet.count
        return VllmEngine(kinds, tuple(sheets), sheet.count, per_id, block, settings, fixed, (note,) if note else ())
    counts = [sheet.count for sheet in sheets]
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    padded = sum(math.ceil(count / size) * size for count in counts) - sum(counts)
    notes = [note] if note else []
    if padded:
        notes.append(f"groups of {size} layers: {padded} layers of padding")
    return VllmEngine(kinds, tuple(sheets), size, sheets[0].page * size, block, settings, fixed, tuple(notes))
