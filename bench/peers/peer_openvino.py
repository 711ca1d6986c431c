"""OpenVINO GenAI on the GGUF file itself, by step. Arguments: GGUF THREADS CTX LABEL CACHE_TYPE.

Its continuous batching is what its own server uses, for one request too.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import serve

CACHE_TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


class OpenVino:
    def __init__(self, arguments: list[str]) -> None:
        self.path, threads, _, self.label, self.cache = arguments
        self.threads = int(threads)
        self.next = 0
        logging.getLogger().setLevel(logging.ERROR)
        self.apart = self._pipeline(sharing=False)
        self.sharing: Any = None

    def info(self) -> dict[str, Any]:
        version = genai.__version__.split("-")[0]
        return {"name": "OpenVINO GenAI", "version": version, "weights": self.label, "cache": self.cache}

    def _pipeline(self, *, sharing: bool) -> Any:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.enable_prefix_caching = sharing
        properties = {"KV_CACHE_PRECISION": CACHE_TYPES[self.cache], "INFERENCE_NUM_THREADS": self.threads}
        return genai.ContinuousBatchingPipeline(self.path, scheduler, "CPU", properties)

    def _submit(self, pipeline: Any, prompt: list[int], tokens: int) -> Any:
        settings = genai.GenerationConfig()
        settings.max_new_tokens, settings.ignore_eos, settings.do_sample = tokens, True, False
        self.next += 1
        return pipeline.add_request(self.next, ov.Tensor(np.array([prompt], dtype=np.int64)), settings)

    @staticmethod
    def _taken(handle: Any) -> int:
        """Tokens that have come since the last call."""
        count = 0
        while handle.can_read():
            count += sum(len(output.generated_ids) for output in handle.read().values())
        return count

    def prefill(self, prompt: list[int]) -> float:
        begin = perf_counter()
        handle = self._submit(self.apart, prompt, 1)  # a request whose handle is dropped is cancelled
        while self.apart.has_non_finished_requests():
            self.apart.step()
        seconds = perf_counter() - begin
        assert self._taken(handle) == 1
        return seconds

    def decode(self, prompt: list[int], tokens: int, windows: int) -> list[float]:
        handle = self._submit(self.apart, prompt, tokens * windows + 1)
        return self._run(self.apart, [handle], [0], tokens, windows)

    def batch(self, prompts: list[list[int]], prefix: int, tokens: int, windows: int) -> list[float]:
        pipeline = self.apart
        if prefix:
            self.sharing = self.sharing or self._pipeline(sharing=True)
            pipeline = self.sharing
        most = tokens * windows + sum(map(len, prompts)) // 128 + len(prompts) + 1
        handles, counts = [], []
        for i, prompt in enumerate(prompts):
            handles.append(self._submit(pipeline, prompt, most))
            counts.append(0)
            while prefix and i == 0 and not counts[0]:
                pipeline.step()
                counts[0] += self._taken(handles[0])
        return self._run(pipeline, handles, counts, tokens, windows)

    def _run(self, pipeline: Any, handles: list[Any], counts: list[int], tokens: int, windows: int) -> list[float]:
        def step() -> int:
            pipeline.step()
            came = [self._taken(handle) for handle in handles]
            for i, count in enumerate(came):
                counts[i] += count
            return sum(came)

        while not all(counts):
            step()
        seconds = []
        for _ in range(windows):
            got, begin = 0, perf_counter()
            for _ in range(tokens):
                got += step()
            seconds.append(perf_counter() - begin)
            assert got == tokens * len(handles), f"{got} tokens in {tokens} steps of {len(handles)} requests"
        for handle in handles:
            handle.cancel()
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return seconds


if __name__ == "__main__":
    serve(OpenVino)
