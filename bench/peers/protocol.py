"""How a peer is driven: one JSON object per line in and out, so that each engine lives in its own Python.

A worker is a class with ``info``, ``prefill``, ``decode`` and ``batch``, handed to ``serve``. Standard library only:
this file is imported by every engine's interpreter. Prompts are token ids; ids in these models are the same everywhere.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from typing import Any, Protocol


class Worker(Protocol):
    def info(self) -> dict[str, Any]:
        """Name, version, types of weights and cache: what stands in the table."""
        ...

    def prefill(self, prompt: list[int]) -> float:
        """Seconds from handing over ``prompt`` to its first token, nothing of it cached."""
        ...

    def decode(self, prompt: list[int], tokens: int, windows: int) -> list[float]:
        """Seconds of each of ``windows`` runs of ``tokens`` greedy tokens after the prompt's first."""
        ...

    def batch(self, prompts: list[list[int]], prefix: int, tokens: int, windows: int) -> list[float]:
        """Seconds of windows of ``tokens`` tokens of every prompt at once, after all have their first token.

        The first ``prefix`` tokens of all prompts are the same: an engine that can share them, shares them.
        """
        ...


def serve(make: Any) -> None:
    """Answer tasks until standard input ends. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        worker: Worker = make(sys.argv[1:])
        answer(worker.info())
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
        return
    for line in sys.stdin:
        task = json.loads(line)
        try:
            seconds = getattr(worker, task.pop("task"))(**task)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            answer({"seconds": seconds if isinstance(seconds, list) else [seconds], "peak_rss_bytes": peak})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
