"""A plan as text: a table, the verdict, and the equations with their numbers put in."""

from __future__ import annotations

from collections.abc import Iterator

from kvist.plan.cost import LayerKind, Piece
from kvist.plan.lengths import LengthPlan
from kvist.plan.record import Plan
from kvist.plan.sizes import show_bytes, show_count

_WORDS = {
    "full": "full attention",
    "swa": "sliding window",
    "chunk": "chunked attention",
    "mla": "latent attention",
    "dsv4": "compressed attention",
    "cross": "cross attention",
    "shared": "reads another layer's",
    "none": "keeps nothing",
    "mamba1": "Mamba state",
    "mamba2": "Mamba 2 state",
    "gdn": "gated delta state",
    "kda": "Kimi delta state",
    "lightning": "lightning state",
    "shortconv": "short convolution",
    "rglru": "RG-LRU state",
}


def render(plan: Plan, *, explain: bool = False, lengths: LengthPlan | None = None) -> str:
    """The whole report."""
    lines = [*_head(plan), "", *_table(plan), "", *_sums(plan), *_memory(plan)]
    if plan.roofline:
        lines += ["", *_roofline(plan)]
    if lengths is not None:
        lines += ["", *_lengths(lengths)]
    if explain:
        lines += ["", *_explain(plan)]
    for title, items in (("assumed", plan.assumed), ("note", plan.notes)):
        if items:
            lines += ["", *(f"{title}: {item}" for item in items)]
    return "\n".join(lines)


def _head(plan: Plan) -> Iterator[str]:
    spec = plan.spec
    yield f"{plan.model}: family {spec.family}, {spec.num_layers} layers, engine {plan.settings.engine}"
    if spec.encoder_only:
        yield "an encoder: it keeps no cache"
    else:
        yield f"cache type {plan.types.name} ({plan.types.source})"


def _table(plan: Plan) -> list[str]:
    """Columns: kind, layers, what a token leaves, bytes per token, most tokens kept, bytes that do not grow."""
    rows = [("kind", "layers", "what stays", "B/token", "tokens kept", "B fixed")]
    for kind in plan.layers:
        pieces = " + ".join(dict.fromkeys(piece.what for piece in kind.pieces)) or "-"
        bounds = {piece.bound for piece in kind.pieces if piece.bound}
        kept = "all" if kind.growing else show_count(min(bounds)) if bounds else "-"
        per_token = float(kind.growing + kind.index + kind.windowed)
        rows.append(
            (
                _WORDS.get(kind.kind, kind.kind),
                str(kind.count),
                pieces,
                show_count(per_token) if per_token else "-",
                kept,
                show_count(kind.fixed) if kind.fixed else "-",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = (False, True, False, True, True, True)
    return [
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in rows
    ]


def _sums(plan: Plan) -> Iterator[str]:
    count = plan.settings.max_num_seqs
    status = "exact" if not plan.types.assumed and not plan.spec.guess else "assumed"
    yield f"a token adds             {show_count(float(plan.growing_bytes_per_token))} B for ever ({status})" + (
        f", and {show_count(plan.windowed_bytes_per_token)} B until windows are full"
        if plan.windowed_bytes_per_token
        else ""
    )
    if plan.indexer_bytes_per_token:
        yield f"an indexer adds          {show_count(float(plan.indexer_bytes_per_token))} B per token"
    yield f"one sequence             {_size(plan.sequence_bytes)} at {show_count(plan.ctx_size)} tokens ({status})"
    if count > 1:
        yield f"{count} sequences".ljust(25) + f"{_size(plan.total_bytes)}"
    own = status if plan.settings.engine == "kvist" else "modelled"
    yield f"{plan.settings.engine} allocates".ljust(25) + f"{_size(plan.allocated_bytes)} ({own})"
    if plan.mha_factor is not None and plan.mha_factor > 1.005:
        yield f"multi-head attention     would keep {plan.mha_factor:.1f} times as much per token at equal type"


def _memory(plan: Plan) -> Iterator[str]:
    room = plan.room
    if plan.weights_bytes is not None:
        yield f"weights                  {_size(plan.weights_bytes)} ({plan.weights_source})"
    if room.left is None:
        return
    if room.total is not None and room.usable is not None:
        where = f" on {plan.device.name}" if plan.device else ""
        share = f", of which {show_bytes(room.usable)} used" if room.usable != room.total else ""
        yield f"memory                   {show_bytes(room.total)}{where}{share}"
    low, high = room.left
    left = show_bytes(low) if low == high else f"{show_bytes(low)} to {show_bytes(high)}"
    yield f"left for K and V         {left}"
    answer = {True: "yes", False: "NO"}.get(bool(plan.fits), "")
    tight = plan.fits is False and plan.allocated_bytes <= high
    yield f"fits                     {answer}" + (" (only if the memory beside weights stays low)" if tight else "")
    best = plan.max_context_at_best
    more = f" to {show_count(best)}" if best is not None and best != plan.max_context else ""
    limit = " (the model's own limit)" if plan.max_context == plan.spec.max_position else ""
    yield (
        f"longest context          {show_count(plan.max_context or 0)}{more} tokens"
        f" for each of {plan.settings.max_num_seqs}{limit}"
    )
    yield f"most sequences           {show_count(plan.max_sequences or 0)} of {show_count(plan.ctx_size)} tokens"
    fitting = [f"{t.name} ({show_count(t.max_context or 0)})" for t in plan.types_that_fit if t.fits]
    yield f"types that fit           {', '.join(fitting) if fitting else 'none'}" + (
        "  (longest context)" if fitting else ""
    )


def _roofline(plan: Plan) -> Iterator[str]:
    assert plan.device is not None and plan.device.bandwidth is not None
    rate = f"{plan.device.bandwidth / 1e9:.0f} GB/s ({plan.device.status}: {plan.device.source})"
    yield f"reading weights and cache alone, {plan.settings.max_num_seqs} sequence(s), {rate}:"
    for point in plan.roofline[-8:]:
        yield (
            f"{show_count(point.ctx).rjust(12)} tokens  {point.seconds * 1e3:9.3f} ms per step"
            f"  {point.tokens_per_second:9.1f} tokens/s"
        )


def _lengths(lengths: LengthPlan) -> Iterator[str]:
    yield (
        f"lengths of {lengths.count} requests: mean {lengths.mean_length:.0f}, p50 {lengths.p50}, p95 {lengths.p95},"
        f" p99 {lengths.p99}, longest {lengths.longest}"
    )
    spread = show_bytes(lengths.deviation_bytes)
    yield f"a request allocates      {show_bytes(lengths.mean_bytes)} on average, +- {spread}"
    if lengths.users_on_average is not None:
        yield (
            f"users                    {lengths.users_on_average} on average, {lengths.users_at_99} in 99 % of moments"
            " (lengths taken as independent)"
        )


def _explain(plan: Plan) -> Iterator[str]:
    ctx = plan.ctx_size
    yield "the sum:"
    for kind in plan.layers:
        for piece in kind.pieces:
            yield f"  {_equation(kind, piece, ctx)}"
    yield f"  one sequence = {show_count(plan.sequence_bytes)} B"
    if plan.settings.max_num_seqs > 1:
        yield (
            f"  {plan.settings.max_num_seqs} x {show_count(plan.sequence_bytes)} ="
            f" {show_count(plan.total_bytes)} B before rounding"
        )
    for line in plan.engine.explain(ctx, plan.settings.max_num_seqs):
        yield f"  {plan.settings.engine}: {line}"
    yield f"  {plan.settings.engine} allocates {show_count(plan.allocated_bytes)} B"
    if plan.room.left is not None and plan.room.usable is not None and plan.settings.kv_cache_memory is None:
        low = plan.room.left[0]
        yield (
            f"  left = {show_count(plan.room.usable)} - {show_count(plan.weights_bytes or 0)} weights"
            f" - {show_count(plan.room.other[1])} other = {show_count(low)} B"
        )


def _equation(kind: LayerKind, piece: Piece, ctx: int) -> str:
    name = _WORDS.get(kind.kind, kind.kind)
    if piece.fixed:
        return (
            f"{name}: {kind.count} layers x ({piece.formula}) = {show_count(kind.count * piece.fixed)} B per sequence"
        )
    tokens = piece.tokens(ctx)
    shown = f"min({ctx}, {piece.bound})" if piece.bound else f"{ctx} / {piece.stride}" if piece.stride > 1 else f"{ctx}"
    total = kind.count * piece.per_token * tokens
    return f"{name}: {kind.count} layers x {piece.formula} x {shown} tokens = {show_count(total)} B"


def _size(size: int) -> str:
    return f"{show_bytes(size)} ({show_count(size)} B)" if size >= 1024 else f"{size} B"
