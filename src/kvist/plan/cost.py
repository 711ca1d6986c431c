"""Bytes that a model's layers leave behind, as pure functions of the spec: exact, before any engine rounds or pads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from kvist.base.errors import UsageError
from kvist.plan.formats import FORMATS, Format
from kvist.spec.kept import (
    CacheLayer,
    CacheSpec,
    CrossRows,
    IndexRows,
    KeyValueRows,
    LatentRows,
    Part,
    StateRows,
    VectorRows,
)


@dataclass(frozen=True, slots=True)
class Widths:
    """How elements are written: keys, values, an indexer's keys, the matrix and the tail of a recurrent state."""

    k: Format
    v: Format
    index: Format = FORMATS["bfloat16"]
    state: Format | None = None
    conv: Format = FORMATS["bfloat16"]
    # Bytes of a latent row where an engine packs it in its own way, for models that also have an indexer.
    latent_row: int | None = None
    index_scale: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes of one part: ``per_token`` for each kept token, ``fixed`` per sequence.

    Kept are all tokens, the newest ``bound``, or one of every ``stride``. ``source`` tokens (an encoder's) are fixed.
    """

    what: str
    per_token: int
    fixed: int
    bound: int | None
    stride: int
    formula: str

    def tokens(self, ctx: int) -> int:
        """Rows that a sequence of ``ctx`` tokens keeps."""
        return (ctx if self.bound is None else min(ctx, self.bound)) // self.stride

    def nbytes(self, ctx: int) -> int:
        """Bytes of a sequence of ``ctx`` tokens."""
        return self.per_token * self.tokens(ctx) + (self.fixed if ctx > 0 else 0)

    @property
    def growing(self) -> Fraction:
        """Bytes that one more token adds for ever."""
        return Fraction(0) if self.bound is not None else Fraction(self.per_token, self.stride)


def piece(part: Part, widths: Widths, source_tokens: int | None = None) -> Piece:
    """The bytes of ``part``; ``source_tokens`` is the length of the other sequence where the model does not fix it."""
    match part:
        case KeyValueRows(heads, key, value):
            nbytes = widths.k.rows(heads, key) + widths.v.rows(heads, value)
            formula = _pairs(heads, key, value, widths)
            what = f"K and V of {heads} heads x {key}" + ("" if key == value else f" / {value}")
            return Piece(what, nbytes, 0, part.bound, 1, formula)
        case LatentRows(rank, rope):
            nbytes = widths.latent_row or widths.k.rows(1, rank + rope)
            formula = f"({rank} + {rope}) x {_each(widths.k)}" if widths.latent_row is None else f"{nbytes} B row"
            return Piece(f"latent {rank} + rope key {rope} = {rank + rope} values", nbytes, 0, None, 1, formula)
        case VectorRows(width, window, stride):
            what = f"one vector of {width} as key and value" + (f" per {stride} tokens" if stride > 1 else "")
            return Piece(what, widths.k.rows(1, width), 0, window, stride, f"{width} x {_each(widths.k)}")
        case IndexRows(width, stride):
            nbytes = widths.index.rows(1, width) + widths.index_scale
            formula = f"{width} x {_each(widths.index)}" + (f" + {widths.index_scale}" if widths.index_scale else "")
            return Piece(f"indexer key {width}", nbytes, 0, None, stride, formula)
        case StateRows():
            state = state_format(part, widths)
            fixed = state.rows(1, part.state) + widths.conv.rows(1, part.conv)
            formula = f"{part.state} x {state.nbytes} B + {part.conv} x {widths.conv.nbytes} B"
            return Piece("recurrent state", 0, fixed, 0, 1, formula)
        case CrossRows(heads, key, value, tokens):
            count = (source_tokens or 0) if tokens is None else tokens
            row = widths.k.rows(heads, key) + widths.v.rows(heads, value)
            formula = f"{count} source tokens x {_pairs(heads, key, value, widths)}"
            return Piece("K and V of the other sequence", 0, row * count, 0, 1, formula)


def state_format(part: StateRows, widths: Widths) -> Format:
    """The type of a recurrent state's matrix: the one asked for, else the config's own, else float32."""
    return widths.state or FORMATS.get(part.state_dtype or "", FORMATS["float32"])


def _each(form: Format) -> str:
    plain = form.nbytes if form.elements == 1 else f"{form.nbytes}/{form.elements}"
    return f"{plain} B" + (f" + {form.row_extra}" if form.row_extra else "")


def _pairs(heads: int, key: int, value: int, widths: Widths) -> str:
    if widths.k == widths.v and not widths.k.row_extra:
        return f"{heads} kv heads x ({key} + {value}) x {_each(widths.k)}"
    return f"{heads} kv heads x ({key} x {_each(widths.k)} + {value} x {_each(widths.v)})"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that keep the same: their kind, how many, and the bytes of one of them."""

    kind: str
    count: int
    pieces: tuple[Piece, ...]

    @property
    def growing(self) -> Fraction:
        """Bytes that one more token adds over all these layers, an indexer's keys aside."""
        return self.count * sum((p.growing for p in self.pieces if not p.what.startswith("indexer")), Fraction(0))

    @property
    def index(self) -> Fraction:
        """Bytes per token of the indexer's keys over all these layers."""
        return self.count * sum((p.growing for p in self.pieces if p.what.startswith("indexer")), Fraction(0))

    @property
    def windowed(self) -> int:
        """Bytes per token over all these layers while a bound is not reached."""
        return self.count * sum(p.per_token for p in self.pieces if p.bound)

    @property
    def fixed(self) -> int:
        """Bytes per sequence over all these layers, whatever its length."""
        return self.count * sum(p.fixed for p in self.pieces)

    def nbytes(self, ctx: int) -> int:
        """Bytes of a sequence of ``ctx`` tokens over all these layers."""
        return self.count * sum(p.nbytes(ctx) for p in self.pieces)


def kinds_of(
    layers: Iterable[CacheLayer], widths: Widths, tensor_parallel: int = 1, source_tokens: int | None = None
) -> tuple[LayerKind, ...]:
    """The layers sorted into kinds, in order of first appearance, for one rank of ``tensor_parallel``."""
    counts: dict[tuple[str, tuple[Piece, ...]], int] = {}
    for layer in layers:
        pieces = tuple(piece(part, widths, source_tokens) for part in per_rank(layer.parts, tensor_parallel))
        key = (layer.kind, pieces)
        counts[key] = counts.get(key, 0) + 1
    return tuple(LayerKind(kind, count, pieces) for (kind, pieces), count in counts.items())


def per_rank(parts: Iterable[Part], ranks: int) -> Iterator[Part]:
    """What one of ``ranks`` tensor-parallel ranks keeps of ``parts``.

    kv heads are divided, and repeated when there are fewer of them than ranks; latents, shared vectors and indexer keys
    are on every rank; states are divided. UsageError when the numbers do not divide.
    """
    for part in parts:
        if ranks == 1 or isinstance(part, LatentRows | VectorRows | IndexRows):
            yield part
        elif isinstance(part, StateRows):
            _divides(part.state, ranks, "elements of the recurrent state")
            _divides(part.conv_channels, ranks, "channels of the convolution")
            yield replace(part, state=part.state // ranks, conv_channels=part.conv_channels // ranks)
        else:
            heads = part.num_kv_heads
            if heads % ranks and ranks % heads:
                raise UsageError(
                    f"{heads} kv heads cannot be spread over {ranks} ranks: use a divisor or a multiple of {heads}"
                )
            yield replace(part, num_kv_heads=max(1, heads // ranks))


def _divides(number: int, ranks: int, what: str) -> None:
    if number % ranks:
        raise UsageError(f"{number} {what} cannot be divided by {ranks} ranks")


def sequence_bytes(kinds: Iterable[LayerKind], ctx: int) -> int:
    """Bytes that one sequence of ``ctx`` tokens leaves: what no engine can go below."""
    return sum(kind.nbytes(ctx) for kind in kinds)


def mha_factor(spec: CacheSpec) -> float | None:
    """How many times more plain multi-head attention with these heads would keep per token, at equal type."""
    layers = [spec.layers[layer.shared_with] if layer.shared_with is not None else layer for layer in spec.layers]
    full = sum(layer.mha_elements for layer in layers)
    kept = sum(_elements(part) for layer in spec.layers for part in layer.parts)
    return None if not full or not kept else float(full / kept)


def _elements(part: Part) -> Fraction:
    match part:
        case KeyValueRows() | LatentRows():
            return Fraction(part.elements)
        case VectorRows(width, window, stride):
            return Fraction(0) if window is not None else Fraction(width, stride)
    return Fraction(0)
