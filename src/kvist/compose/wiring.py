"""From a model's name and settings to an engine: what is built, in which order, and how large the pool is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32, parse_dtype
from kvist.base.errors import UsageError
from kvist.base.machine import available_memory
from kvist.cache.addressing import check_block_size
from kvist.cache.layout import groups_of
from kvist.cache.pool import Pool
from kvist.cache.sizing import BLOCK_SIZE, DEFAULT_CTX, bytes_per_token, shared_blocks, step_tokens
from kvist.compose.llm import LLM, Setup
from kvist.engine.engine import Engine, EngineSettings
from kvist.engine.scheduler import SchedulerSettings
from kvist.kernels.dispatch import choose
from kvist.model.checkpoint import Checkpoint, GgufCheckpoint, SafetensorsCheckpoint
from kvist.model.decoder import Decoder
from kvist.model.held import held_as
from kvist.model.latent import expand_from, key_bytes
from kvist.model.weights import load_weights
from kvist.spec.bounded import bounded
from kvist.spec.from_config import model_spec
from kvist.spec.from_gguf import gguf_model
from kvist.spec.model import LatentAttention, ModelSpec
from kvist.spec.rope import fix_context
from kvist.spec.source import ModelSource, resolve
from kvist.text.tokenizer import Tokenizer

Progress = Callable[[int, int], None]  # bytes read so far, bytes of the model's files

DEFAULT_SINKS = 4
PREFILLS = ("absorb", "expand")
EXPAND = "expand"
MOST_POSITIONS = 1 << 22  # of a bounded context: its rotation tables grow with it


def load(
    model: str | Path,
    *,
    ctx_size: int | None = None,
    weights: str = "auto",
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    block_size: int | None = None,
    threads: int | None = None,
    max_num_seqs: int = 16,
    memory: int | None = None,
    cache: bool = True,
    kv_window: int | None = None,
    kv_sinks: int | None = None,
    mla_prefill: str = "absorb",
    progress: Progress | None = None,
) -> LLM:
    """Load ``model``: an alias (``smollm2``, ``gemma3``), a ``.gguf`` file, or a folder of config.json and safetensors.

    ``ctx_size``: most stored tokens of a request, by default the model's own limit up to 8192.
    ``weights``: packed (what GGUF has quantised stays so in memory), float32 or bfloat16; auto takes packed where there
    is something to pack, native kernels run, and ``dtype`` does not say otherwise.
    ``dtype`` of weights that are not packed: float32 or bfloat16; auto leaves a float32 checkpoint as it is, else takes
    bfloat16, or float32 where only the reference kernels run. ``kv_cache_dtype``: float32, bfloat16 or float16; auto
    is ``dtype``.
    ``max_num_seqs`` requests run at once; they share a pool of one context, or of as many tokens as ``memory`` bytes
    hold. ``kv_window`` bounds the memory of a request whatever its length: a query sees the newest ``kv_window`` keys
    and the first ``kv_sinks`` (by default 4), which is another function than full attention. ``mla_prefill``: absorb
    (one form always), or expand (latents become keys and values of every head in steps of many tokens: faster there,
    and the last bits then depend on how a prompt was cut). ``cache`` False keeps nothing and recomputes everything for
    each token. ``progress`` hears bytes read and bytes in all.

    Prints nothing. Raises what is wrong before anything large is allocated: UsageError, SpecError, FormatError,
    WeightsError, OutOfMemory.
    """
    source = resolve(str(model))
    spec, checkpoint, tokenizer = open_model(source)
    sinks = _sinks(kv_window, kv_sinks)
    if kv_window is not None:
        spec = bounded(spec, kv_window, sinks)
    ctx = _context(spec, ctx_size, kv_window is not None)
    if kv_window is not None and kv_window + sinks >= ctx:
        raise UsageError(
            f"kv_window {kv_window} and {sinks} sinks keep all of the {ctx} tokens that ctx_size allows, so nothing is "
            "bounded: lower kv_window, raise ctx_size, or leave kv_window out"
        )
    spec = _with_prefill(fix_context(spec, ctx), mla_prefill)
    chunk = step_tokens(ctx, max_num_seqs)
    scheduler = SchedulerSettings(ctx, chunk, max_num_seqs)
    choice = choose(threads)
    held = held_as(spec, checkpoint, choice.backend, weights, dtype)
    weight_dtype, expand = held.dtype, mla_prefill == EXPAND
    if expand:
        held = replace(held, nbytes=held.nbytes + key_bytes(spec, weight_dtype))
    kv_dtype = (
        weight_dtype if kv_cache_dtype == "auto" else parse_dtype(kv_cache_dtype, allowed=(FLOAT32, BFLOAT16, FLOAT16))
    )
    size = BLOCK_SIZE if block_size is None else block_size
    check_block_size(size)
    groups = groups_of(spec, kv_dtype, size, chunk)
    held.require_memory(source.name)
    blocks = shared_blocks(groups, ctx, chunk, max_num_seqs, memory)
    pool = Pool(groups, blocks, available=_room(held.nbytes, memory), chunk=chunk)
    total = sum(path.stat().st_size for path in source.shards())
    heard = _counted(progress, total)
    loaded = load_weights(spec, checkpoint, choice.backend, weight_dtype, heard, packed=held.packed, expand=expand)
    decoder = Decoder(spec, loaded, choice.backend, pool, max_positions=ctx, max_tokens=chunk, max_rows=max_num_seqs)
    eos = frozenset(spec.eos_token_ids) | frozenset(tokenizer.eos_token_ids)
    engine = Engine(decoder, groups, pool.blocks, EngineSettings(scheduler, eos, cache, keep=True))
    setup = Setup(
        name=source.name,
        spec=spec,
        kernels=choice.backend.name,
        refusals=choice.refusals,
        dtype=weight_dtype.name,
        weights=held.name,
        kv_cache_dtype=kv_dtype.name,
        block_size=size,
        ctx_size=ctx,
        max_num_seqs=max_num_seqs,
        cache=cache,
        weight_bytes=loaded.nbytes,
        cache_bytes=pool.nbytes,
        bytes_per_token=bytes_per_token(groups),
        kv_window=kv_window,
        kv_sinks=sinks,
    )
    return LLM(engine, tokenizer, spec.vocab_size, setup)


def open_model(source: ModelSource) -> tuple[ModelSpec, Checkpoint, Tokenizer]:
    """Everything small about a model; its tensors are named and checked, none is read."""
    if source.kind == "gguf":
        model = gguf_model(source.path)
        return model.spec, GgufCheckpoint(model), Tokenizer.from_gguf(model.file)
    spec = model_spec(source.path)
    return spec, SafetensorsCheckpoint(spec, source.shards()), Tokenizer.from_folder(source.path)


def _with_prefill(spec: ModelSpec, form: str) -> ModelSpec:
    """``spec`` with a note where latents are expanded. UsageError for another word, or a model without latents."""
    if form not in PREFILLS:
        raise UsageError(f"mla_prefill is {form!r}: use {' or '.join(PREFILLS)}")
    if form != EXPAND:
        return spec
    latents = [layer.attention for layer in spec.layers if isinstance(layer.attention, LatentAttention)]
    if not latents:
        raise UsageError(f"mla_prefill is expand, but this {spec.family} model keeps keys and values, no latents")
    least = max(expand_from(attention) for attention in latents)
    note = f"latents are expanded in steps of {least} tokens a request or more: outside law 1"
    return replace(spec, notes=(*spec.notes, note))


def default_context(spec: ModelSpec) -> int:
    """Tokens of a context when nobody says: the model's own limit, up to 8192."""
    return min(spec.max_position, DEFAULT_CTX)


def _sinks(window: int | None, sinks: int | None) -> int:
    if window is None:
        if sinks is not None:
            raise UsageError(f"kv_sinks is {sinks} without kv_window: only a window leaves sinks behind")
        return 0
    return DEFAULT_SINKS if sinks is None else sinks


def _context(spec: ModelSpec, ctx_size: int | None, bounded: bool) -> int:
    if ctx_size is None:
        return default_context(spec)
    # In bounded memory a text may outgrow the model's range: how well it then reads is the user's to judge. Learned
    # positions end where they end.
    most = MOST_POSITIONS if bounded and spec.learned_positions is None else spec.max_position
    if not isinstance(ctx_size, int) or not 1 <= ctx_size <= most:
        beyond = bounded or spec.learned_positions is not None
        remedy = "use fewer" if beyond else "use fewer, or bound the memory with kv_window, which may go beyond them"
        raise UsageError(
            f"ctx_size is {ctx_size!r}, but this model was made for 1 to {spec.max_position} positions: {remedy}"
        )
    return ctx_size


def _room(weight_bytes: int, memory: int | None) -> int | None:
    """Bytes that the cache may take: what was allowed, and no more than the weights will leave."""
    free = available_memory()
    limits = [memory] if free is None else [memory, free - weight_bytes]
    return min((limit for limit in limits if limit is not None), default=None)


def _counted(progress: Progress | None, total: int) -> Callable[[int], None] | None:
    if progress is None:
        return None
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    return count
