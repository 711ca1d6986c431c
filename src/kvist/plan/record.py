"""The record of a plan: every number, where it came from, and whether it is exact, measured or assumed."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvist.plan.cost import LayerKind
from kvist.plan.device import Device
from kvist.plan.engines.base import Engine
from kvist.plan.settings import PlanSettings, Types
from kvist.plan.sizes import show_bytes, show_count
from kvist.spec.kept import CacheSpec


@dataclass(frozen=True, slots=True)
class Fact:
    """A number with its derivation. ``status`` is exact, measured or assumed."""

    value: float | None
    status: str
    formula: str


@dataclass(frozen=True, slots=True)
class Room:
    """Memory on one rank. ``left`` is (least, most) bytes for K and V after weights and ``other`` (most, least)."""

    total: int | None
    usable: int | None
    weights: int | None
    other: tuple[int, int]
    left: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """Time of one step of all sequences at ``ctx`` tokens, were reading weights and cache all it did."""

    ctx: int
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class TypeAnswer:
    """Whether a cache type fits, and the longest context with it."""

    name: str
    allocated_bytes: int
    fits: bool | None
    max_context: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was worked out. Bytes are those of one rank where the model is split over several."""

    model: str
    spec: CacheSpec
    settings: PlanSettings
    types: Types
    engine: Engine
    ctx_size: int
    layers: tuple[LayerKind, ...]
    sequence_bytes: int
    allocated_bytes: int
    weights_bytes: int | None
    weights_source: str
    room: Room
    device: Device | None
    fits: bool | None
    max_context: int | None
    max_context_at_best: int | None
    max_sequences: int | None
    types_that_fit: tuple[TypeAnswer, ...]
    roofline: tuple[RooflinePoint, ...]
    mha_factor: float | None
    assumed: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def growing_bytes_per_token(self) -> Fraction:
        """Bytes that one more token of a sequence adds for ever: keys, values, latents; an indexer's keys aside."""
        return sum((kind.growing for kind in self.layers), Fraction(0))

    @property
    def indexer_bytes_per_token(self) -> Fraction:
        """Bytes per token of a sparse-attention indexer's keys."""
        return sum((kind.index for kind in self.layers), Fraction(0))

    @property
    def windowed_bytes_per_token(self) -> int:
        """Bytes per token in layers that keep a window or a chunk only."""
        return sum(kind.windowed for kind in self.layers)

    @property
    def fixed_bytes(self) -> int:
        """Bytes per sequence whatever its length: states and rows of another sequence."""
        return sum(kind.fixed for kind in self.layers)

    @property
    def total_bytes(self) -> int:
        """Bytes that all sequences leave at the context, before any rounding."""
        return self.sequence_bytes * self.settings.max_num_seqs

    @property
    def exit_code(self) -> int:
        """0 fits or nothing to compare with, 3 does not fit."""
        return 3 if self.fits is False else 0

    def facts(self) -> dict[str, Fact]:
        """Every number with its status and its sum."""
        ctx, count, name = self.ctx_size, self.settings.max_num_seqs, self.settings.engine
        status = "assumed" if self.types.assumed or self.spec.guess else "exact"
        own = status if name == "kvist" else "assumed"
        grow = " + ".join(show_count(float(k.growing)) for k in self.layers if k.growing) or "0"
        facts = {
            "growing_bytes_per_token": Fact(float(self.growing_bytes_per_token), status, grow),
            "sequence_bytes": Fact(self.sequence_bytes, status, f"all layers at {show_count(ctx)} tokens"),
            "total_bytes": Fact(self.total_bytes, status, f"{count} x {show_count(self.sequence_bytes)}"),
            "allocated_bytes": Fact(
                self.allocated_bytes, own, "; ".join(self.engine.explain(ctx, count)) if self.layers else "nothing"
            ),
            "weights_bytes": Fact(
                self.weights_bytes,
                "exact" if self.weights_source.startswith("exact") else "assumed",
                self.weights_source,
            ),
        }
        low, high = self.room.other
        measured = "measured" if self.settings.other_bytes else "assumed"
        facts["other_bytes"] = Fact(high, measured, f"{show_bytes(low)} to {show_bytes(high)} beside weights and cache")
        if self.device is not None:
            facts["bandwidth"] = Fact(self.device.bandwidth, self.device.status, self.device.source)
        return facts

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        left = self.room.left
        return {
            "model": self.model,
            "family": self.spec.family,
            "architecture": self.spec.architecture,
            "engine": self.settings.engine,
            "kv_cache_dtype": self.types.name,
            "kv_cache_dtype_source": self.types.source,
            "ctx_size": self.ctx_size,
            "max_num_seqs": self.settings.max_num_seqs,
            "tensor_parallel": self.settings.tensor_parallel,
            "growing_bytes_per_token": _whole(self.growing_bytes_per_token),
            "windowed_bytes_per_token": self.windowed_bytes_per_token,
            "indexer_bytes_per_token": _whole(self.indexer_bytes_per_token),
            "fixed_bytes_per_sequence": self.fixed_bytes,
            "sequence_bytes": self.sequence_bytes,
            "total_bytes": self.total_bytes,
            "allocated_bytes": self.allocated_bytes,
            "weights_bytes": self.weights_bytes,
            "weights_source": self.weights_source,
            "other_bytes": list(self.room.other),
            "memory_bytes": self.room.total,
            "kv_memory_bytes": None if left is None else list(left),
            "max_context": self.max_context,
            "max_context_at_best": self.max_context_at_best,
            "max_sequences": self.max_sequences,
            "fits": self.fits,
            "mha_factor": self.mha_factor,
            "runnable": self.spec.runnable,
            "encoder_only": self.spec.encoder_only,
            "guess": self.spec.guess,
            "assumed": list(self.assumed),
            "notes": list(self.notes),
            "layers": [_layer(kind) for kind in self.layers],
            "types": [
                {"type": t.name, "allocated_bytes": t.allocated_bytes, "fits": t.fits, "max_context": t.max_context}
                for t in self.types_that_fit
            ],
            "roofline": [
                {"ctx": p.ctx, "seconds": p.seconds, "tokens_per_second": p.tokens_per_second} for p in self.roofline
            ],
            "facts": {
                name: {"value": fact.value, "status": fact.status, "formula": fact.formula}
                for name, fact in self.facts().items()
            },
        }


def _whole(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def _layer(kind: LayerKind) -> dict[str, Any]:
    per_token = kind.growing + kind.index + kind.windowed
    bounds = sorted({piece.bound for piece in kind.pieces if piece.bound})
    return {
        "kind": kind.kind,
        "count": kind.count,
        "bytes_per_token": _whole(per_token),
        "bytes_per_token_per_layer": _whole(per_token / kind.count),
        "fixed_bytes": kind.fixed,
        "keeps_at_most": bounds[0] if bounds and not kind.growing else None,
        "keeps": [piece.what for piece in kind.pieces],
    }
