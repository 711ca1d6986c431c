"""kvist as a peer of the others: the engine as shipped, driven by step. Arguments: MODEL THREADS CTX [WEIGHTS]."""

from __future__ import annotations

import os
from time import perf_counter
from typing import Any

from protocol import serve

import kvist
from kvist.engine.request import Request


class Kvist:
    def __init__(self, arguments: list[str]) -> None:
        model, threads, ctx = arguments[0], int(arguments[1]), int(arguments[2])
        weights = arguments[3] if len(arguments) > 3 else "auto"
        # Room for the batch: eight requests apart. Untouched memory costs nothing.
        self.llm = kvist.load(model, threads=threads, ctx_size=ctx, memory=2 << 30, weights=weights)

    def info(self) -> dict[str, Any]:
        setup = self.llm.setup
        assert setup is not None
        kernels = setup.kernels.removeprefix("native-")
        return {
            "name": f"kvist ({kernels})" if os.environ.get("KVIST_KERNELS") else "kvist",
            "version": kvist.__version__,
            "weights": setup.weights,
            "cache": setup.kv_cache_dtype,
        }

    def _submit(self, prompt: list[int], tokens: int) -> Request:
        return self.llm.engine.submit(prompt, kvist.Sampling(max_tokens=tokens, ignore_eos=True))

    def prefill(self, prompt: list[int]) -> float:
        begin = perf_counter()
        request = self._submit(prompt, 1)
        while not request.finished:
            self.llm.engine.step()
        return perf_counter() - begin

    def decode(self, prompt: list[int], tokens: int, windows: int) -> list[float]:
        return self._run([self._submit(prompt, tokens * windows + 1)], tokens, windows)

    def batch(self, prompts: list[list[int]], prefix: int, tokens: int, windows: int) -> list[float]:
        most = tokens * windows + sum(map(len, prompts)) // 256 + len(prompts) + 1
        running = []
        for prompt in prompts:
            running.append(self._submit(prompt, most))
            while prefix and not running[0].generated:
                self.llm.engine.step()
        return self._run(running, tokens, windows)

    def _run(self, running: list[Request], tokens: int, windows: int) -> list[float]:
        step = self.llm.engine.step
        while not all(request.generated for request in running):
            step()
        seconds = []
        for _ in range(windows):
            before = sum(len(request.generated) for request in running)
            begin = perf_counter()
            for _ in range(tokens):
                step()
            seconds.append(perf_counter() - begin)
            got = sum(len(request.generated) for request in running) - before
            assert got == tokens * len(running), f"{got} tokens in {tokens} steps of {len(running)} requests"
        for request in running:
            self.llm.engine.abort(request.id)
        return seconds


if __name__ == "__main__":
    serve(Kvist)
