"""From the start of a process to a model's first token, in parts. Prints JSON; the goal is 3 s, warm, for both models.

Every run is a process of its own. The first of each model is left out: it fills the system's file cache, and writes the
converted vocabulary to the user's cache folder when that is not there. Nothing here asserts on time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from statistics import median
from subprocess import run
from time import time

GOAL_S = 3.0
PROMPT = "Once upon a time"
CODE = """
import json, sys, time
model, dtype, start = sys.argv[1], sys.argv[2], float(sys.argv[3])
marks = {"python_s": time.time() - start}

def mark(name, begin):
    marks[name] = time.time() - begin

begin = time.time()
import torch
mark("import_torch_s", begin)
begin = time.time()
from kvist.compose import load
mark("import_kvist_s", begin)
begin = time.time()
llm = load(model, dtype=dtype)
mark("load_s", begin)
begin = time.time()
llm.generate(sys.argv[4], max_tokens=1, ignore_eos=True)
mark("first_token_s", begin)
mark("total_s", start)
print(json.dumps({"kernels": llm.setup.kernels, "dtype": llm.setup.dtype, **marks}))
"""


def once(model: str, dtype: str) -> dict[str, float | str]:
    """Seconds of each part, and in all."""
    done = run([sys.executable, "-c", CODE, model, dtype, repr(time()), PROMPT], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{model}: {done.stderr.strip()}")
    found: dict[str, float | str] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["smollm2", "gemma3"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for model in options.models:
        once(model, options.dtype)
        runs = [once(model, options.dtype) for _ in range(options.rounds)]
        parts = {name: median(float(r[name]) for r in runs) for name in runs[0] if name.endswith("_s")}
        least = min(float(r["total_s"]) for r in runs)
        rows.append(
            {
                "model": model,
                "kernels": runs[0]["kernels"],
                "dtype": runs[0]["dtype"],
                "rounds": options.rounds,
                **{name: round(value, 3) for name, value in parts.items()},
                "least_total_s": round(least, 3),
                "of_goal": round(parts["total_s"] / GOAL_S, 3),
            }
        )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    print(json.dumps({"goal_s": GOAL_S, "processors": os.cpu_count(), "load_1min": load, "startup": rows}, indent=1))


if __name__ == "__main__":
    main()
