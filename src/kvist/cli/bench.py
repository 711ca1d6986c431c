"""``kvist bench``: how fast this machine runs a model, beside what it could at most, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvist.measure.bench import Report
    from kvist.measure.rate import Rate


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="An alias (smollm2, gemma3), a .gguf file, a folder of safetensors, a hub id, ollama:NAME."
        ),
    ],
    weights: Annotated[
        str, typer.Option(help="Weights held as auto, packed (as GGUF has them), bfloat16 or float32.", metavar="HOW")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw tokens/s against depth (png, svg, pdf).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer figures and repeats: under a minute here.")] = False,
) -> None:
    """Measure a model on this machine: prefill, decoding at several depths, eight requests at once, attention alone,
    start-up and memory. Beside each rate stands its limit: what memory can be read at, or products computed at.

    Other settings are the shipped defaults. For example:

      kvist bench smollm2

      kvist bench smollm2 --weights bfloat16

      kvist bench smollm2 --quick --json
    """
    from kvist.measure.bench import QUICK, WHOLE, bench

    if plot is not None:
        from kvist.measure.picture import check_picture

        check_picture(plot)
    talk = sys.stderr.isatty()

    def announce(text: str) -> None:
        start, end = ("\r\x1b[K", "") if talk else ("", "\n")
        print(f"{start}bench: {text} ...", end=end, file=sys.stderr, flush=True)

    report = bench(model, QUICK if quick else WHOLE, weights=weights, announce=announce)
    if talk:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    print(json.dumps(report.json(), indent=1) if as_json else table(report))
    if plot is not None:
        from kvist.measure.picture import draw

        draw(report, plot)
        print(f"wrote {plot}", file=sys.stderr)


HEADER = f"{'':<38}{'median':>10}{'min':>10}{'max':>10}{'limit':>10}{'of it':>8}"


def table(report: Report) -> str:
    """The report for people."""
    threads = f"{report.threads} thread{'s' if report.threads != 1 else ''}"
    lines = [
        f"{report.model} on {report.kernels} (fingerprint {report.fingerprint}), {threads}",
        f"weights {report.weights}, {report.weight_bytes / 1e6:,.1f} MB; "
        f"cache {report.kv_cache_dtype}, {report.bytes_per_token:,} bytes per token",
        "",
        f"{'tokens/s':<38}{HEADER[38:]}",
        *(line(f"prefill of {tokens:,}", rate) for tokens, rate in report.prefill),
        *(line(f"decode at depth {depth:,}", rate) for depth, rate in report.decode),
        *(
            line(f"{b.requests} requests at {b.depth:,}, " + ("one prefix" if b.shared_prefix else "apart"), b.rate)
            for b in report.batch
        ),
    ]
    if report.attention:
        lines += ["", f"{'attention alone, GB/s':<38}{HEADER[38:]}"]
    for found in report.attention:
        s = found.shape
        over = "a latent" if s.latent else f"{s.kv_heads}"
        lines.append(line(f"{s.dtype.name}, {s.heads} heads over {over}, width {s.head_dim}", found.rate))
    lines += ["", f"{'reading, GB/s':<38}{HEADER[38:68]}"]
    for reading in report.reading:
        many = f"{reading.threads} thread{'s' if reading.threads != 1 else ''}"
        lines.append(line(f"{'memory' if reading.source == 'ram' else 'cache'}, {many}", reading.rate))
    parts = report.startup.parts
    lines += [
        "",
        f"start to first token {report.startup.whole.median:.2f} s (python {parts['python_s'].median:.2f}, imports "
        f"{parts['import_s'].median:.2f}, load {parts['load_s'].median:.2f}, "
        f"first token {parts['first_token_s'].median:.2f})",
        f"peak memory {report.peak_rss_bytes / 2**20:,.0f} MiB; "
        f"fastest product {report.product_flops / 1e9:,.0f} GFLOP/s",
        *(f"left out: {reason}" for reason in report.left_out),
    ]
    return "\n".join(lines)


def line(name: str, rate: Rate) -> str:
    """One row of the table; the last two columns are empty where there is no limit."""
    text = f"{name:<38}{number(rate.median):>10}{number(rate.lowest):>10}{number(rate.highest):>10}"
    if rate.limit is None or rate.of_limit is None:
        return text
    return f"{text}{number(rate.limit):>10}{rate.of_limit:>7.0%} "


def number(value: float) -> str:
    """Three figures or so."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"
