"""``kvist plan``: what the cache of a model costs, here and in other engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvist.base.errors import UsageError

if TYPE_CHECKING:
    from kvist.plan.calibrate import Calibration
    from kvist.plan.command import Command
    from kvist.plan.record import Plan


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL [-- COMMAND...]",
            help="An alias, a GGUF file, a config.json or its folder, a hub id, or ollama:NAME; after -- another "
            "engine's command.",
        ),
    ] = None,
    ctx_size: Annotated[
        str | None, typer.Option("--ctx-size", "--max-model-len", help="Tokens of each sequence: 4096, 32k, or max.")
    ] = None,
    max_num_seqs: Annotated[str | None, typer.Option(help="Sequences at once.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="Cache type of keys and values.")] = "auto",
    cache_type_k: Annotated[str | None, typer.Option(help="Cache type of keys alone.")] = None,
    cache_type_v: Annotated[str | None, typer.Option(help="Cache type of values alone.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of one device: 24GiB, 80GB.")] = None,
    kv_cache_memory: Annotated[str | None, typer.Option(help="Memory for K and V alone, instead of --memory.")] = None,
    device: Annotated[str | None, typer.Option(help="A device of the table (h100, rtx-4090, ...), or this.")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Ranks that the model is split over.")] = 1,
    engine: Annotated[str, typer.Option(help="kvist, vllm, sglang or llama.cpp.")] = "kvist",
    weights_dtype: Annotated[str | None, typer.Option(help="Type of the weights, if not the checkpoint's own.")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Positions of one block (kvist, vllm) or page (sglang).")
    ] = None,
    source_tokens: Annotated[int | None, typer.Option(help="Encoder or image tokens for cross attention.")] = None,
    lengths: Annotated[Path | None, typer.Option(help="A file of lengths, one per line, to size users by.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Start-up log of an engine, to compare and calibrate with.")
    ] = None,
    assume_standard: Annotated[
        bool, typer.Option("--assume-standard", help="Guess the plain rule for an unknown architecture.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show the equation with the numbers put in.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (png, svg, pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Say what the cache of a model costs before anything is loaded.

    `kvist plan smollm2 --device this` sizes kvist's own pool; `kvist plan org/model --engine vllm --memory 80GiB`
    sizes another engine's; `kvist plan -- vllm serve org/model --max-model-len 32k` reads that command.
    Exit code 0: it fits, or no memory was given; 3: it does not fit; 2: bad input.
    """
    from kvist.plan.calibrate import read_log
    from kvist.plan.command import find_command, read_command
    from kvist.plan.plan import make_plan
    from kvist.plan.plot import check_ending, draw
    from kvist.plan.settings import PlanSettings
    from kvist.plan.sizes import parse_count, parse_size

    words = words or []
    start = find_command(words)
    pasted = None if start is None else read_command(words[start:])
    own = words if start is None else words[:start]
    if len(own) > 1:
        raise UsageError(
            f"{' '.join(own)!r} is neither one model nor a known command: vllm serve, sglang, llama-server, llama-cli,"
            " ollama, and python -m of the first two are known"
        )
    model = own[0] if own else pasted.model if pasted else None
    if model is None:
        raise UsageError("no model: give an alias, a GGUF file, a config.json or its folder, or a hub id")
    settings = PlanSettings(
        ctx_size=None if ctx_size is None else 0 if ctx_size == "max" else parse_count(ctx_size, "--ctx-size"),
        max_num_seqs=1 if max_num_seqs is None else parse_count(max_num_seqs, "--max-num-seqs"),
        kv_cache_dtype=kv_cache_dtype,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        memory=None if memory is None else parse_size(memory, "--memory"),
        kv_cache_memory=None if kv_cache_memory is None else parse_size(kv_cache_memory, "--kv-cache-memory"),
        device=device,
        tensor_parallel=tensor_parallel,
        engine=engine,
        weights_dtype=weights_dtype,
        block_size=block_size,
        source_tokens=source_tokens,
    )
    if pasted is not None:
        settings = pasted.plan_settings(settings)
    log = read_log(_text(calibrate)) if calibrate is not None else None
    if log is not None and log.other_bytes is not None:
        from dataclasses import replace

        settings = replace(settings, other_bytes=(log.other_bytes, log.other_bytes))
    if plot is not None:
        check_ending(plot)
    plan = make_plan(model, settings, assume_standard=assume_standard)
    _print(plan, pasted, log, lengths, explain=explain, as_json=as_json)
    if plot is not None:
        draw(plan, plot)
        print(f"wrote {plot}", file=sys.stderr)
    return plan.exit_code


def _print(
    plan: Plan,
    pasted: Command | None,
    log: Calibration | None,
    lengths: Path | None,
    *,
    explain: bool,
    as_json: bool,
) -> None:
    from dataclasses import asdict

    from kvist.plan.compare import compare
    from kvist.plan.lengths import plan_lengths, read_lengths
    from kvist.plan.report import render

    sized = None
    if lengths is not None:
        left = plan.room.left
        sized = plan_lengths(plan.engine, read_lengths(lengths), None if left is None else left[0])
    checked = compare(plan, log) if log is not None else ()
    if as_json:
        whole = plan.to_dict()
        if pasted is not None:
            whole["command"] = [asdict(mark) for mark in pasted.marks]
        if sized is not None:
            whole["lengths"] = asdict(sized)
        if log is not None:
            whole["calibration"] = [asdict(item) for item in checked]
        print(json.dumps(whole, indent=1))
        return
    print(render(plan, explain=explain, lengths=sized))
    if pasted is not None:
        print()
        for mark in pasted.marks:
            value = "" if mark.value is None else f" {mark.value}"
            print(f"{mark.state.ljust(15)}{mark.flag}{value}" + (f"  ({mark.note})" if mark.note else ""))
    for item in checked:
        print(item.sentence)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
