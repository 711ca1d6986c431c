"""The same work in kvist and in other engines, taking turns in one run; prints ratios and a table for the README.

    python bench/peers/compare.py smollm2 \\
        --llama-cpp VENV/bin/python --openvino VENV/bin/python --transformers VENV/bin/python

Each engine lives in its own Python and stays loaded. For each task the engines take turns, round after round, so that
what else the machine does falls on all alike; a ratio is kvist's rate over the other's in the same round, of which the
median is reported. Greedy decoding, the same token ids for all, prompts never repeated.

llama.cpp reads the Q4_1 file and a bfloat16 one that is made of it; OpenVINO reads the Q4_1 file. kvist runs as it is
shipped, weights packed, and once more with bfloat16 weights; its cache is bfloat16. --extra-kernels avx2 adds both,
forced to that variant.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import unquantised  # noqa: E402  (beside this file)

import kvist  # noqa: E402
from kvist.base.machine import processors  # noqa: E402
from kvist.kernels.dispatch import choose  # noqa: E402
from kvist.measure.limits import read_bandwidth  # noqa: E402
from kvist.measure.serving import Prompts  # noqa: E402

PAUSE = 0.3  # seconds between turns: threads of the engine before must have stopped spinning
PREFILLS, DEPTHS, SEQS, SEQ_DEPTH, OWN = (512, 4096), (0, 1024, 4096, 7900), 8, 1024, 8


class Engine:
    """A worker process that keeps its model loaded."""

    def __init__(self, python: str, script: str, arguments: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [python, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"} | environment,
        )
        begin = time.perf_counter()
        self.info = self._read()
        self.load_s = time.perf_counter() - begin
        self.peak = 0

    @property
    def label(self) -> str:
        return f"{self.info['name']} {self.info['version']}, {self.info['weights']} weights, {self.info['cache']} cache"

    def ask(self, task: dict[str, Any]) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        found = self._read()
        self.peak = max(self.peak, found["peak_rss_bytes"])
        return list(found["seconds"])

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"it ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def tasks(options: argparse.Namespace, prompts: Prompts) -> list[tuple[str, int, Any]]:
    """(name, tokens of one measurement, a maker of the task with fresh prompts)."""
    found: list[tuple[str, int, Any]] = []
    for n in options.prefill:
        found.append((f"prefill {n}", n, lambda n=n: {"task": "prefill", "prompt": prompts.take(n)}))
    length, windows = options.tokens, options.windows
    for depth in options.depths:
        make = {"task": "decode", "tokens": length, "windows": windows}
        found.append((f"decode {depth}", length, lambda d=depth, m=make: m | {"prompt": prompts.take(max(d, 1))}))
    for prefix in (0, SEQ_DEPTH) if options.batch else ():

        def several(prefix: int = prefix) -> dict[str, Any]:
            head = prompts.take(prefix) if prefix else []
            own = OWN if prefix else SEQ_DEPTH
            made = [[*head, *prompts.take(own)] for _ in range(SEQS)]
            return {"task": "batch", "prompts": made, "prefix": prefix, "tokens": length, "windows": windows}

        found.append((f"{SEQS} at {SEQ_DEPTH}, {'one prefix' if prefix else 'apart'}", SEQS * length, several))
    return found


Results = dict[str, dict[str, list[float]]]


def measure(
    engines: list[Engine], options: argparse.Namespace, prompts: Prompts, keep: Callable[[Results], None]
) -> Results:
    """Rates: task -> engine -> one for each round (the median of its windows). ``keep`` is called after each task."""
    results: Results = {}
    broken: set[str] = set()
    for name, tokens, make in tasks(options, prompts):
        rates: dict[str, list[float]] = {engine.label: [] for engine in engines}
        for round_ in range(options.rounds + 1):  # the first is not counted: shapes are compiled, memory is paged in
            for engine in engines:
                if engine.label in broken:
                    continue
                time.sleep(PAUSE)
                try:
                    seconds = engine.ask(make())
                except (RuntimeError, BrokenPipeError) as error:
                    print(f"  {engine.label}: {name} failed: {error}", file=sys.stderr)
                    if engine.process.poll() is not None:
                        broken.add(engine.label)
                    continue
                if round_:
                    rates[engine.label].append(tokens / median(seconds))
        results[name] = rates
        keep(results)
        print(
            f"{name:<24}" + "  ".join(f"{median(r):,.1f}" if r else "-" for r in rates.values()),
            file=sys.stderr,
            flush=True,
        )
    return results


def ratios(rates: dict[str, list[float]], ours: str) -> dict[str, float]:
    """kvist's rate over each other engine's, round by round, and of these the median."""
    mine = rates[ours]
    return {
        label: median(a / b for a, b in zip(mine, other, strict=False))
        for label, other in rates.items()
        if other and mine
    }


def readme(results: Results, engines: list[Engine]) -> str:
    """A markdown table: a row for each engine, a column for each task, tokens per second; and the ratios below."""
    names = list(results)
    ours = engines[0].label
    lines = ["| tokens/s | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for engine in engines:
        cells = [f"{median(results[n][engine.label]):,.0f}" if results[n][engine.label] else "" for n in names]
        lines.append(f"| {engine.label} | " + " | ".join(cells) + " |")
    lines += ["", "| kvist is faster by | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for engine in engines[1:]:
        cells = []
        for n in names:
            factor = ratios(results[n], ours).get(engine.label)
            cells.append("" if factor is None else f"{factor:.2f}")
        lines.append(f"| {engine.label} | " + " | ".join(cells) + " |")
    best = []
    for n in names:
        found = [f for label, f in ratios(results[n], ours).items() if not label.startswith("kvist")]
        best.append(f"{min(found):.2f}" if found else "")
    return "\n".join([*lines, "| the best of them | " + " | ".join(best) + " |"])


def start(options: argparse.Namespace, folder: Path) -> list[Engine]:
    """Every engine that was asked for and starts."""
    source = str(unquantised.resolve(options.model).path)
    common = [str(options.threads), str(options.ctx_size)]
    wanted = [
        (sys.executable, "peer_kvist.py", [options.model, *common, *weights], environment)
        for environment in ({}, *({"KVIST_KERNELS": name} for name in options.extra_kernels))
        for weights in ([], *([["bfloat16"]] if options.unquantised else []))
    ]
    if options.llama_cpp and options.unquantised:
        plain = options.bf16_gguf or folder / "bfloat16.gguf"
        if not plain.exists():
            print("making a bfloat16 GGUF file", file=sys.stderr)
            unquantised.convert(Path(source), plain, "bfloat16")
        wanted.append((options.llama_cpp, "peer_llama_cpp.py", [str(plain), *common, "bfloat16", "float16"], {}))
    if options.llama_cpp:
        wanted.append((options.llama_cpp, "peer_llama_cpp.py", [source, *common, options.type, "float16"], {}))
    if options.openvino:
        wanted.append((options.openvino, "peer_openvino.py", [source, *common, options.type, "float16"], {}))
    if options.transformers:
        wanted.append((options.transformers, "peer_transformers.py", [source, *common, options.model, "bfloat16"], {}))
    engines = []
    for python, script, arguments, environment in wanted:
        try:
            # Engines that size their team by OpenMP's default must not take more processors than kvist.
            engine = Engine(python, script, arguments, {"OMP_NUM_THREADS": str(options.threads)} | environment)
        except (RuntimeError, OSError) as error:
            print(f"{script} {' '.join(arguments[3:])}: left out, {error}", file=sys.stderr)
            continue
        print(f"{engine.label}: loaded in {engine.load_s:.1f} s", file=sys.stderr, flush=True)
        engines.append(engine)
    return engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2", help="an alias or a .gguf file")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--openvino", metavar="PYTHON", help="an interpreter that has openvino-genai")
    parser.add_argument(
        "--transformers", metavar="PYTHON", help="an interpreter that has transformers, torch and gguf; this one has"
    )
    parser.add_argument("--bf16-gguf", type=Path, metavar="FILE", help="where the bfloat16 file is, or shall be kept")
    parser.add_argument("--threads", type=int, default=processors())
    parser.add_argument("--ctx-size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="of one window of decoding")
    parser.add_argument("--windows", type=int, default=3, help="windows in each round, of which the median counts")
    parser.add_argument("--prefill", type=int, nargs="*", default=list(PREFILLS))
    parser.add_argument("--depths", type=int, nargs="*", default=list(DEPTHS))
    parser.add_argument("--no-batch", dest="batch", action="store_false")
    parser.add_argument(
        "--extra-kernels", nargs="*", default=[], metavar="VARIANT", help="kvist again, forced to these"
    )
    parser.add_argument("--type", default="Q4_1", help="what the file's weights are called in the table")
    parser.add_argument(
        "--as-is", dest="unquantised", action="store_false", help="the file alone: its bfloat16 form may not fit"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    options = parser.parse_args()
    reading = read_bandwidth(choose().backend, [options.threads], time.perf_counter, 5)
    gbps = max(r.rate.highest for r in reading if r.source == "ram")
    with tempfile.TemporaryDirectory() as folder, kvist.load(options.model, ctx_size=64, threads=1) as llm:
        prompts = Prompts(llm, max([*options.prefill, *options.depths, SEQ_DEPTH]))
        engines = start(options, Path(folder))
        if not engines:
            sys.exit("no engine started")

        def keep(results: Results) -> None:
            """A run takes minutes: what is measured so far is on disk."""
            if options.json:
                options.json.write_text(json.dumps(report(options, gbps, engines, results), indent=1) + "\n")

        try:
            results = measure(engines, options, prompts, keep)
        finally:
            for engine in engines:
                engine.close()
    print(f"{options.threads} threads; memory reads {gbps:.1f} GB/s; {options.rounds} rounds\n")
    print(readme(results, engines))


def report(options: argparse.Namespace, gbps: float, engines: list[Engine], results: Results) -> dict[str, Any]:
    """Everything measured, for other programs."""
    return {
        "model": options.model,
        "threads": options.threads,
        "read_gbps": gbps,
        "engines": [e.info | {"label": e.label, "load_s": e.load_s, "peak_rss_bytes": e.peak} for e in engines],
        "rates": results,
        "ratios": {name: ratios(rates, engines[0].label) for name, rates in results.items()},
    }


if __name__ == "__main__":
    main()
