"""What a run did and cost: a few lines for people, one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvist.cache.layout import Group
    from kvist.compose import LLM, Completion


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """The pool of a run: ``nbytes`` allocated, once; ``kept`` False: nothing outlives a step (--no-cache)."""

    nbytes: int
    bytes_per_token: int
    dtype: str
    shape: str
    ctx_size: int
    kept: bool
    window: int | None = None  # of --kv-window
    sinks: int = 0
    notes: tuple[str, ...] = ()

    def rows_kept(self, seen: int) -> int:
        """Rows that a request of ``seen`` tokens still has in each bounded layer."""
        return seen if self.window is None else min(seen, self.window + self.sinks)


def cache_facts(llm: LLM) -> CacheFacts:
    """The facts of ``llm``'s pool."""
    setup = llm.setup
    assert setup is not None  # every loaded model has one
    return CacheFacts(
        nbytes=setup.cache_bytes,
        bytes_per_token=setup.bytes_per_token,
        dtype=setup.kv_cache_dtype,
        shape=" + ".join(map(_shape, llm.engine.groups)),
        ctx_size=setup.ctx_size,
        kept=setup.cache,
        window=setup.kv_window,
        sinks=setup.kv_sinks,
        notes=tuple(note for note in setup.spec.notes if note.startswith(("LongRoPE", "latents"))),
    )


def _shape(group: Group) -> str:
    """What a token leaves in the layers of ``group``: layers x kv heads x width, or the width of a latent."""
    from kvist.cache.rows import Latent

    rows, count = group.layout.rows, len(group.layers)
    if isinstance(rows, Latent):
        parts = f"{rows.kv_lora_rank} + {rows.qk_rope_head_dim} rotated"
        return f"latents of {count} layers x {rows.elements_per_token} ({parts}), shared by all heads"
    heads, width = getattr(rows, "num_kv_heads", 1), getattr(rows, "head_dim", None)
    size = f"keys and values of {count} layers x {heads} kv head{'s' if heads != 1 else ''} x {width}"
    return f"{size} (window {group.window})" if group.window is not None else size


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the requests of a run; a rate or time is None where nothing was measured."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prefill_tok_s: float | None
    decode_tok_s: float | None
    ttft_s: float | None
    with_cache: int
    without_cache: int
    ending: str | None  # how the last one ended
    tokens_seen: int = 0  # by the last one: every token but the last generated, which is only read
    unread: int = 0  # tokens of the last prompt that were never read: it was ended before


def totals(completions: Sequence[Completion]) -> Totals:
    """The sums over ``completions``; time to first token is their mean."""
    prefilled = [c for c in completions if c.prefill_s]
    decoded = [c for c in completions if c.decode_s]
    waits = [c.ttft_s for c in completions if c.ttft_s is not None]
    prefill_s, decode_s = sum(c.prefill_s or 0 for c in prefilled), sum(c.decode_s or 0 for c in decoded)
    return Totals(
        text="".join(c.text for c in completions),
        prompt_tokens=sum(c.prompt_tokens for c in completions),
        cached_tokens=sum(c.cached_tokens for c in completions),
        generated_tokens=sum(c.generated_tokens for c in completions),
        prefill_tok_s=sum(c.prompt_tokens - c.cached_tokens for c in prefilled) / prefill_s if prefill_s else None,
        decode_tok_s=sum(c.generated_tokens - 1 for c in decoded) / decode_s if decode_s else None,
        ttft_s=sum(waits) / len(waits) if waits else None,
        with_cache=sum(c.projections for c in completions),
        without_cache=sum(c.projections_without_cache for c in completions),
        ending=completions[-1].finish_reason if completions else None,
        tokens_seen=_seen(completions[-1]) if completions else 0,
        unread=max(0, completions[-1].prompt_tokens - _seen(completions[-1])) if completions else 0,
    )


def _seen(completion: Completion) -> int:
    if completion.generated_tokens:
        return completion.prompt_tokens + completion.generated_tokens - 1
    # Ended while its prompt was read: what went through the layers by then.
    return min(completion.prompt_tokens, completion.cached_tokens + completion.projections)


def as_object(run: Totals, cache: CacheFacts) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    held: dict[str, Any] = {"bytes": cache.nbytes, "bytes_per_token": cache.bytes_per_token, "dtype": cache.dtype}
    held |= {"tokens_seen": run.tokens_seen, "rows_kept": cache.rows_kept(run.tokens_seen)}
    if cache.window is not None:
        held |= {"kv_window": cache.window, "kv_sinks": cache.sinks}
    return {
        "text": run.text,
        "prompt_tokens": run.prompt_tokens,
        "generated_tokens": run.generated_tokens,
        "prefill_tok_s": run.prefill_tok_s,
        "decode_tok_s": run.decode_tok_s,
        "ttft_s": run.ttft_s,
        "cache": held,
        "projections": {"with_cache": run.with_cache, "without_cache": run.without_cache},
    }


def as_lines(run: Totals, cache: CacheFacts) -> list[str]:
    """The closing summary."""
    wait = "" if run.ttft_s is None else f", first token after {seconds(run.ttft_s)}"
    held = f"{size(cache.nbytes)} for a context of {cache.ctx_size:,} tokens"
    if not cache.kept:
        held = f"nothing kept between steps (--no-cache); room to work in: {held}"
    times = run.without_cache / run.with_cache if run.with_cache else 1.0
    ratio = f" ({times:.1f} times as many)" if times > 1 else ""
    without = f"; {run.without_cache:,} without a cache{ratio}" if run.without_cache else ""
    ending = {"length": ", cut off at the limit", "abort": ", interrupted"}.get(run.ending or "", "")
    found = f" ({run.cached_tokens:,} of them in the cache)" if run.cached_tokens else ""
    found += f" ({run.unread:,} of them not read)" if run.unread else ""
    bounds = []
    if cache.window is not None:
        rows = f"{run.tokens_seen:,} tokens seen, {cache.rows_kept(run.tokens_seen):,} rows kept"
        first = f"the first {cache.sinks} and " if cache.sinks else ""
        bounds = [f"window       {rows}: {first}the newest {cache.window:,}; another function than full attention"]
    return [
        f"prompt       {run.prompt_tokens:,} tokens{found}{_rate(run.prefill_tok_s)}{wait}",
        f"generated    {run.generated_tokens:,} tokens{_rate(run.decode_tok_s)}{ending}",
        f"cache        {cache.bytes_per_token:,} bytes per token, {held}",
        f"             {cache.dtype}, {cache.shape}",
        *bounds,
        *(f"             {note}" for note in cache.notes),
        f"projections  {run.with_cache:,} tokens through the layers{without}",
    ]


def _rate(value: float | None) -> str:
    return "" if value is None else f", {value:,.1f} tokens/s"


def seconds(value: float) -> str:
    """A duration in seconds or milliseconds."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def size(nbytes: int) -> str:
    """A number of bytes in the largest binary unit that leaves at least one before the point."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
