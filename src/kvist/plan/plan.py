"""Planning: a model and settings become one record."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from kvist.base.errors import UsageError
from kvist.cache.sizing import DEFAULT_CTX
from kvist.plan.cost import LayerKind, mha_factor, sequence_bytes
from kvist.plan.device import Device, find_device
from kvist.plan.engines.base import LIMIT, Engine, max_context, max_sequences
from kvist.plan.formats import ALLOWED, parse_format
from kvist.plan.inputs import Model, load_spec
from kvist.plan.record import Plan, RooflinePoint, Room, TypeAnswer
from kvist.plan.settings import (
    OTHER,
    UTILISATION,
    PlanSettings,
    Types,
    choose_types,
    make_engine,
)
from kvist.plan.sizes import parse_count, parse_size, show_bytes
from kvist.spec.kept import CacheSpec

_WRITTEN = {
    "ctx_size": parse_count,
    "max_num_seqs": parse_count,
    "memory": parse_size,
    "kv_cache_memory": parse_size,
}
_WEIGHTS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


def plan(model: Model, *, assume_standard: bool = False, **options: Any) -> Plan:
    """Plan ``model``: an alias, a file, a folder, a hub id, or a config as a dict.

    ``options`` are the fields of ``PlanSettings``; sizes and counts may be written like "24GiB" and "32k", and
    ``ctx_size`` "max" is the model's longest context. Raises UsageError, SpecError or FormatError.
    """
    known = PlanSettings.__dataclass_fields__
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UsageError(f"unknown option {', '.join(unknown)}: a plan has {', '.join(known)}")
    if options.get("ctx_size") == "max":
        options["ctx_size"] = 0
    for name, parse in _WRITTEN.items():
        if isinstance(options.get(name), str):
            options[name] = parse(options[name], name)
    return make_plan(model, PlanSettings(**options), assume_standard=assume_standard)


def make_plan(model: Model, settings: PlanSettings | None = None, *, assume_standard: bool = False) -> Plan:
    """Plan ``model``. Raises UsageError, SpecError or FormatError that names the field or option."""
    settings = settings or PlanSettings()
    name, spec = load_spec(model, assume_standard)
    types = choose_types(spec, settings)
    ctx = _context(spec, settings)
    device = find_device(settings.device) if settings.device else None
    engine = make_engine(spec, types, settings) if spec.layers else _Nothing()
    weights, source = _weights(spec, settings)
    room = _room(settings, device, weights)
    count, limit = settings.max_num_seqs, spec.max_position or LIMIT
    allocated = engine.allocated(ctx, count)
    left = room.left
    best = None if left is None else max_context(engine, left[1], count, limit)
    return Plan(
        model=name,
        spec=spec,
        settings=settings,
        types=types,
        engine=engine,
        ctx_size=ctx,
        layers=engine.kinds,
        sequence_bytes=sequence_bytes(engine.kinds, ctx),
        allocated_bytes=allocated,
        weights_bytes=weights,
        weights_source=source,
        room=room,
        device=device,
        fits=None if left is None else allocated <= left[0],
        max_context=None if left is None else max_context(engine, left[0], count, limit),
        max_context_at_best=best,
        max_sequences=None if left is None else max_sequences(engine, left[0], ctx, 2**24),
        types_that_fit=_types(spec, settings, ctx, left, limit),
        roofline=_roofline(engine, settings, ctx, weights, device),
        mha_factor=mha_factor(spec),
        assumed=(*_assumed(spec, types, settings, source, weights), *_flags(engine, settings)),
        notes=_notes(spec, settings),
    )


class _Nothing:
    """The engine of a model that keeps no cache."""

    name = "none"
    kinds: tuple[LayerKind, ...] = ()

    def allocated(self, ctx: int, sequences: int) -> int:
        """Nothing."""
        del ctx, sequences
        return 0

    def explain(self, ctx: int, sequences: int) -> tuple[str, ...]:
        """Nothing to sum."""
        del ctx, sequences
        return ()


def _context(spec: CacheSpec, settings: PlanSettings) -> int:
    if settings.ctx_size == 0:
        if spec.max_position is None:
            raise UsageError("ctx_size is max, but the config names no longest context: give a number")
        return spec.max_position
    if settings.ctx_size is not None:
        return settings.ctx_size
    return min(spec.max_position or DEFAULT_CTX, DEFAULT_CTX)


def _weights(spec: CacheSpec, settings: PlanSettings) -> tuple[int | None, str]:
    """Bytes of the weights on one rank, and where the number came from."""
    size, source = spec.weights_bytes, spec.weights_source
    asked = settings.weights_dtype
    if asked is not None:
        if asked not in _WEIGHTS:
            raise UsageError(f"unknown weights type {asked!r}: use one of {', '.join(_WEIGHTS)}")
        if spec.parameters is not None:
            size, source = int(spec.parameters * _WEIGHTS[asked]), f"exact: {spec.parameters:,} elements as {asked}"
        elif size is not None:
            width = _WEIGHTS.get(spec.dtype or "", 2.0)
            size, source = int(size / width * _WEIGHTS[asked]), f"{source}, scaled to {asked}"
    if settings.engine == "kvist" and spec.runnable and spec.parameters is not None:
        # As loaded: matrices in one type, norms and biases in float32.
        width = _WEIGHTS[asked] if asked in ("float32", "bfloat16") else 4.0 if spec.dtype == "float32" else 2.0
        size = int((spec.parameters - spec.vectors) * width) + spec.vectors * 4
        source = f"exact: {spec.parameters:,} elements as loaded, {width:g} B each, norms 4 B"
    return (None if size is None else -(-size // settings.tensor_parallel)), source


def _room(settings: PlanSettings, device: Device | None, weights: int | None) -> Room:
    other = settings.other_bytes or OTHER[settings.engine]
    if settings.kv_cache_memory is not None:
        given = settings.kv_cache_memory
        return Room(None, given, weights, other, (given, given))
    total = settings.memory if settings.memory is not None else device.memory if device else None
    if total is None:
        return Room(None, None, weights, other, None)
    usable = int(total * (settings.utilisation or UTILISATION[settings.engine]))
    rest = usable - (weights or 0)
    return Room(total, usable, weights, other, (max(0, rest - other[1]), max(0, rest - other[0])))


def _types(
    spec: CacheSpec, settings: PlanSettings, ctx: int, left: tuple[int, int] | None, limit: int
) -> tuple[TypeAnswer, ...]:
    """Every type of the engine that can store this model, widest first."""
    answers = []
    for name in ALLOWED[settings.engine] if spec.layers else ():
        form = parse_format(name, settings.engine)
        plain = replace(settings, kv_cache_dtype=name, cache_type_k=None, cache_type_v=None)
        try:
            engine = make_engine(spec, Types(form, form, "asked"), plain)
            needed = engine.allocated(ctx, settings.max_num_seqs)
        except (UsageError, ValueError) as error:
            if not isinstance(error, UsageError):
                raise
            continue
        longest = None if left is None else max_context(engine, left[0], settings.max_num_seqs, limit)
        answers.append(TypeAnswer(name, needed, None if left is None else needed <= left[0], longest))
    return tuple(answers)


def _roofline(
    engine: Engine, settings: PlanSettings, ctx: int, weights: int | None, device: Device | None
) -> tuple[RooflinePoint, ...]:
    """Time to read weights and cache once, at doubling contexts up to ``ctx``."""
    if device is None or not device.bandwidth or weights is None:
        return ()
    points = sorted({ctx, *(2**power for power in range(7, 41) if 2**power < ctx)})
    result = []
    for tokens in points:
        seconds = (weights + settings.max_num_seqs * sequence_bytes(engine.kinds, tokens)) / device.bandwidth
        result.append(RooflinePoint(tokens, seconds, settings.max_num_seqs / seconds))
    return tuple(result)


def _assumed(
    spec: CacheSpec, types: Types, settings: PlanSettings, source: str, weights: int | None
) -> tuple[str, ...]:
    items = list(spec.assumed)
    if spec.guess:
        items.append("GUESS: no row for this architecture; every layer taken to keep keys and values of every token")
    if types.assumed:
        items.append(types.assumed)
    if settings.ctx_size is None:
        items.append("context: the default, the model's own up to 8192")
    if weights is None:
        items.append(f"weights not counted: {source}")
    elif not source.startswith("exact"):
        items.append(f"weights {source}")
    low, high = settings.other_bytes or OTHER[settings.engine]
    if settings.memory or settings.device:
        kind = "measured" if settings.other_bytes else "a range from experience"
        span = show_bytes(low) if low == high else f"{show_bytes(low)} to {show_bytes(high)}"
        items.append(f"memory beside weights and cache: {span} ({kind}); the verdict uses the most")
        share = settings.utilisation or UTILISATION[settings.engine]
        if share < 1:
            items.append(f"the engine takes {share:.0%} of the memory")
    return tuple(items)


def _flags(engine: Engine, settings: PlanSettings) -> tuple[str, ...]:
    """The other engine's flags that nobody gave, with the values taken for them."""
    record = getattr(engine, "settings", None)
    if record is None:
        return ()
    given = {*settings.engine_flags, "tensor_parallel", *(("block_size", "page_size") if settings.block_size else ())}
    taken = [f"{name} {value}" for name, value in asdict(record).items() if name not in given]
    return (f"{engine.name} defaults: {', '.join(taken)}",) if taken else ()


def _notes(spec: CacheSpec, settings: PlanSettings) -> tuple[str, ...]:
    notes = list(spec.notes)
    crossing = any(piece for layer in spec.layers for piece in layer.parts if getattr(piece, "tokens", 0) is None)
    if crossing and settings.source_tokens is None:
        notes.append("cross attention keeps rows of another sequence too; --source-tokens N counts them")
    if settings.engine == "kvist" and not spec.runnable and not spec.encoder_only:
        notes.append("kvist cannot run this architecture yet: the figures are what its layout would take")
    if settings.tensor_parallel > 1:
        notes.append(f"bytes are those of one of {settings.tensor_parallel} ranks")
    return tuple(notes)
