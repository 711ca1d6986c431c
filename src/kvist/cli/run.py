"""``kvist run``: continue a text, answer a prompt, or chat."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvist.base.errors import KernelError, UsageError
from kvist.cli.answer import consume, print_summary
from kvist.cli.progress import progress
from kvist.cli.prompt import read_prompt
from kvist.cli.summary import as_object, cache_facts, totals

if TYPE_CHECKING:
    from kvist.compose import LLM, Completion
    from kvist.engine.request import Sampling

MAX_TOKENS = 512
INTERRUPTED = 130


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="smollm2, gemma3, a .gguf file, a folder with config.json and safetensors, a hub id (owner/name, "
            "owner/name:Q4_K_M), or ollama:NAME.",
            metavar="MODEL",
        ),
    ],
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text; - reads stdin. Left out: what is piped in, else a chat.", metavar="PROMPT"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Most tokens of an answer.", metavar="N")
    ] = MAX_TOKENS,
    ctx_size: Annotated[
        int | None, typer.Option(help="Most tokens in the cache. Default: the model's limit, up to 8192.", metavar="N")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; 1 is the model's own distribution.", metavar="T")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Choose among the K likeliest tokens.", metavar="K")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Choose among the fewest tokens that reach probability P.", metavar="P")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Leave out tokens below P times the likeliest one.", metavar="P")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same tokens.", metavar="N")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text. Can be given several times.", metavar="TEXT")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Default: all processors.", metavar="N")] = None,
    weights: Annotated[
        str,
        typer.Option(
            help="How weights are held: packed (as GGUF has quantised them), bfloat16, float32. "
            "auto: packed where there is something to pack.",
            metavar="HOW",
        ),
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Type of weights that are not packed: auto, float32, bfloat16.", metavar="TYPE")
    ] = "auto",
    kv_cache_dtype: Annotated[
        str,
        typer.Option(help="Type of the cache: auto (that of the weights), float32, bfloat16, float16.", metavar="TYPE"),
    ] = "auto",
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per cache block: a multiple of 16 that fits 128.", metavar="N")
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="A system message before the conversation.", metavar="TEXT")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the prompt from FILE (UTF-8); - is stdin.", metavar="FILE")
    ] = None,
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Continue the text as it stands.")
    ] = False,
    kv_window: Annotated[
        int | None,
        typer.Option(
            help="Bounded memory: see only the newest N keys. Another function than the model's.", metavar="N"
        ),
    ] = None,
    kv_sinks: Annotated[
        int | None, typer.Option(help="With --kv-window: and the first N. Default: 4.", metavar="N")
    ] = None,
    mla_prefill: Annotated[
        str,
        typer.Option(help="Latents in long steps: absorb, or expand (faster, outside law 1).", metavar="HOW"),
    ] = "absorb",
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Keep nothing: recompute every token at every step. Same text, slower.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text and summary.")] = False,
) -> None:
    """Run a model: continue a text, answer a prompt, or chat.

    The text goes to stdout as it comes, a summary to stderr at the end. Ctrl-C ends a run with the summary so far.

    Without PROMPT, and with nothing piped in, it is a chat: Ctrl-C stops an answer, Ctrl-D ends.

    For example:

      kvist run smollm2 "Write one sentence about the sea."
      kvist run gemma3 --temperature 0.8 --seed 7 "Once upon a time"
      kvist run smollm2 --kv-window 1024 --kv-sinks 4 --ctx-size 100000 -n 50000 "Once upon a time"
      kvist run smollm2 --no-chat-template --stop . "The capital of France is"
      cat report.txt | kvist run model.gguf --ctx-size 4096 --json
    """
    from kvist.engine.request import Sampling  # the record of the engine, which needs no torch

    sampling = Sampling(temperature, top_k, top_p, min_p, seed, max_tokens, tuple(stop or ()))
    settings = _settings(ctx_size, weights, dtype, kv_cache_dtype, block_size, threads, no_cache)
    settings |= _bounds(kv_window, kv_sinks) | {"mla_prefill": mla_prefill}
    if no_chat_template and system is not None:
        raise UsageError("--system needs the chat template that --no-chat-template leaves out: drop one of them")
    text = read_prompt(prompt, prompt_file)
    if text is None:
        _talk(model, settings, sampling, system, no_chat_template, as_json)
        return
    llm = _load(model, settings)
    completion, interrupted = _answer(llm, text, sampling, system, no_chat_template, show=not as_json)
    facts, run = cache_facts(llm), totals([completion])
    if as_json:
        print(json.dumps(as_object(run, facts), ensure_ascii=False))
    else:
        if not completion.text.endswith("\n"):
            print(flush=True)
        print_summary([completion], llm)
    if completion.error is not None:
        raise KernelError(f"the run ended early: {completion.error}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _settings(
    ctx_size: int | None,
    weights: str,
    dtype: str,
    kv_cache_dtype: str,
    block_size: int | None,
    threads: int | None,
    no_cache: bool,
) -> dict[str, Any]:
    """The settings of ``kvist.load``, checked as far as that is possible without a model."""
    from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32, parse_dtype
    from kvist.base.machine import MOST_THREADS
    from kvist.cache.addressing import check_block_size

    if ctx_size is not None and ctx_size < 1:
        raise UsageError(f"--ctx-size is {ctx_size}: it must be 1 or more")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"--threads is {threads}: use 1 to {MOST_THREADS}, or leave it out for all processors")
    for name, wanted, allowed in (
        ("--dtype", dtype, (FLOAT32, BFLOAT16)),
        ("--kv-cache-dtype", kv_cache_dtype, (FLOAT32, BFLOAT16, FLOAT16)),
    ):
        if wanted != "auto":
            try:
                parse_dtype(wanted, allowed=allowed)
            except UsageError as error:
                raise UsageError(f"{name}: {error}, or auto") from None
    if weights not in ("auto", "packed", FLOAT32.name, BFLOAT16.name):
        raise UsageError(f"--weights is {weights!r}: use packed, bfloat16, float32 or auto")
    if block_size is not None:
        check_block_size(block_size)
    return {
        "ctx_size": ctx_size,
        "weights": weights,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "block_size": block_size,
        "threads": threads,
        "cache": not no_cache,
        "max_num_seqs": 1,
    }


def _bounds(window: int | None, sinks: int | None) -> dict[str, int | None]:
    if window is not None and window < 1:
        raise UsageError(f"--kv-window is {window}: a query must see 1 key or more")
    if sinks is not None and (window is None or sinks < 0):
        raise UsageError(f"--kv-sinks is {sinks}: use 0 or more, together with --kv-window")
    return {"kv_window": window, "kv_sinks": sinks}


def _load(model: str, settings: dict[str, Any]) -> LLM:
    from kvist.spec.source import resolve

    resolve(model)  # a model that is not there is told before torch is imported
    from kvist.compose import load

    with progress(f"loading {model}") as bar:
        return load(model, progress=bar, **settings)


def _answer(
    llm: LLM, text: str, sampling: Sampling, system: str | None, plain: bool, *, show: bool
) -> tuple[Completion, bool]:
    """Run one prompt; what became of it, and whether Ctrl-C ended it."""
    if not plain and not llm.tokenizer.has_chat_template:
        reason = f"{llm.setup.name if llm.setup else 'this model'} has no chat template (a base model)"
        if system is not None:
            raise UsageError(f"{reason}, so it cannot take --system: put all of it into the prompt")
        print(f"kvist: {reason}: the prompt is continued as plain text", file=sys.stderr)
        plain = True
    if plain:
        stream = llm.stream(text, sampling)
    else:
        messages = [{"role": "user", "content": text}]
        stream = llm.stream_chat([{"role": "system", "content": system}, *messages] if system else messages, sampling)
    return consume(llm, stream, show=show)


def _talk(
    model: str, settings: dict[str, Any], sampling: Sampling, system: str | None, plain: bool, as_json: bool
) -> None:
    """A chat, refused where none is possible."""
    if plain or as_json:
        raise UsageError(f"a chat cannot be had with {'--no-chat-template' if plain else '--json'}: give a prompt")
    from kvist.cli.chat import Chat
    from kvist.spec.source import resolve
    from kvist.text.tokenizer import Tokenizer

    source = resolve(model)
    if not Tokenizer.load(source).has_chat_template:
        raise UsageError(
            f"{source.name} has no chat template: it is a base model, which continues text and does not answer; "
            f'give it a text to continue: kvist run {model} "Once upon a time"'
        )
    llm = _load(model, settings)
    chat = Chat(llm, sampling, system)
    chat.run()
    if chat.completions:
        print_summary(chat.completions, llm)
