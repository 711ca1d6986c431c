"""``kvist verify``: the laws on the user's own model, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvist.verify.report import LawRow


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="An alias (smollm2, gemma3), a .gguf file, a folder of safetensors, a hub id, ollama:NAME."
        ),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Shorter text: under a minute on a small model.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Longer text, every kernel variant, float32 and bfloat16.")
    ] = False,
    weights: Annotated[
        str, typer.Option(help="Weights held as auto, packed (as GGUF has them), bfloat16 or float32.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="Weights unpacked to bfloat16 or float32, or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Prove on your own model that the same tokens give the same bits, whatever way they take through the cache.

    Exit code 0 when every law holds on every path, 1 when not, 2 for bad input.

    Examples:

      kvist verify smollm2 --quick

      kvist verify gemma3 --full --json
    """
    from kvist.base.errors import UsageError

    if quick and full:
        raise UsageError("--quick and --full contradict each other: use one of them")
    from kvist.verify.run import FULL, NORMAL, QUICK, verify

    effort = QUICK if quick else FULL if full else NORMAL
    talk = sys.stderr.isatty()

    def announce(text: str) -> None:
        if talk:
            print(f"\r\x1b[K{text} ...", end="", file=sys.stderr, flush=True)

    titled = False

    def found(row: LawRow) -> None:
        nonlocal titled
        if as_json:
            return
        if talk:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        if not titled:  # with the first row: an error before it is one line
            titled = True
            print(f"{'law':<22}{'path':<34}{'kernels':<12}{'weights':<10}{'positions':>9}  bits")
        print(line(row), flush=True)

    report = verify(model, effort, dtype=dtype, weights=weights, announce=announce, found=found)
    if talk:
        print("\r\x1b[K", end="", file=sys.stderr)
    if as_json:
        print(json.dumps(report.json(), indent=1))
    else:
        bad = sum(not row.holds for row in report.laws)
        print(f"\n{len(report.laws)} paths, {'all equal' if not bad else f'{bad} not'}; kernels {report.fingerprint}")
    raise typer.Exit(0 if report.holds else 1)


def line(row: LawRow) -> str:
    """One row of the table; a difference takes a second line."""
    verdict = "equal" if row.holds else "NOT EXERCISED" if row.equal is None else "DIFFERENT"
    if row.name == "by value":
        verdict = "close" if row.holds else "WRONG"
    text = f"{row.name:<22}{row.path:<34}{row.kernels:<12}{row.dtype:<10}{row.positions:>9}  {verdict}"
    if row.detail:
        text += f"  ({row.detail})"
    d = row.first_difference
    if d is not None:
        where = d.operation if d.layer is None else f"layer {d.layer}, {d.operation}"
        text += f"\n    first at position {d.position}: {where}; {d.elements} logits differ, by up to {d.largest:.3g}"
    return text
