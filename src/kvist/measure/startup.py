"""Start-up: from the start of a process to its first token, each time in a new process with files in memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from kvist.base.errors import UsageError
from kvist.measure.rate import Clock, Rate, rate

PARTS = ("python_s", "import_s", "load_s", "first_token_s")


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds from the start of the process to the first token, and where they went."""

    whole: Rate
    parts: dict[str, Rate]

    def json(self) -> dict[str, Any]:
        """``{seconds, min, max, repeats, python_s, import_s, load_s, first_token_s}``."""
        found = self.whole.json("seconds")
        chosen = {key: found[key] for key in ("seconds", "min", "max", "repeats")}
        return chosen | {name: part.median for name, part in self.parts.items()}


def measure_startup(model: str, weights: str, clock: Clock, repeats: int) -> Startup:
    """Start ``model`` in a process of its own, once to warm up and then ``repeats`` times. UsageError if it fails.

    ``weights``: how they are held, as ``kvist.load`` takes the word.
    """
    whole: list[float] = []
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    for round_ in range(repeats + 1):
        begin, wall = clock(), time.monotonic()
        child = subprocess.run(
            [sys.executable, "-m", "kvist.measure.startup", model, weights], capture_output=True, text=True, check=False
        )
        seconds = clock() - begin
        if child.returncode != 0:
            reason = child.stderr.strip().splitlines()[-1:] or ["no message"]
            raise UsageError(f"{model} did not start in a process of its own: {reason[0]}")
        if round_ == 0:
            continue
        marks = json.loads(child.stdout)
        # The process that ends is not part of starting.
        whole.append(min(seconds, marks["first_token"] - wall))
        stops = (wall, marks["python"], marks["import"], marks["load"], marks["first_token"])
        for name, first, last in zip(PARTS, stops[:-1], stops[1:], strict=True):
            parts[name].append(last - first)
    return Startup(rate(whole), {name: rate(values) for name, values in parts.items()})


def _child(model: str, weights: str) -> None:
    marks = {"python": time.monotonic()}
    from kvist.compose import load

    marks["import"] = time.monotonic()
    llm = load(model, weights=weights)
    marks["load"] = time.monotonic()
    next(llm.stream("The capital of France is", max_tokens=4), None)
    marks["first_token"] = time.monotonic()
    print(json.dumps(marks))


if __name__ == "__main__":
    _child(*sys.argv[1:])
