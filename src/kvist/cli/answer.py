"""An answer printed while it comes, and what it cost afterwards."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvist.cli.progress import watching
from kvist.cli.summary import as_lines, cache_facts, totals

if TYPE_CHECKING:
    from kvist.compose import LLM, Completion, Stream


def consume(llm: LLM, stream: Stream, *, show: bool) -> tuple[Completion, bool]:
    """Print ``stream`` piece by piece (when ``show``); the completion, and whether Ctrl-C ended it."""
    metrics, interrupted = llm.engine.metrics, False
    before = metrics.projections
    try:
        with watching("reading the prompt", lambda: metrics.projections - before, stream.completion.prompt_tokens):
            piece = next(stream, None)
        while piece is not None:
            if show:
                sys.stdout.write(piece)
                sys.stdout.flush()
            piece = next(stream, None)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        stream.close()
    for piece in stream:  # what was held back when it was stopped
        if show:
            sys.stdout.write(piece)
    return stream.completion, interrupted


def print_summary(completions: list[Completion], llm: LLM) -> None:
    """The closing summary, on stderr."""
    sys.stdout.flush()
    lines = as_lines(totals(completions), cache_facts(llm))
    print("", *lines, sep="\n", file=sys.stderr, flush=True)
