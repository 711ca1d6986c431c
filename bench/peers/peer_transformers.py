"""transformers in bfloat16: sdpa attention, dynamic cache. Arguments: GGUF THREADS CTX MODEL CACHE_TYPE.

A greedy loop of its own: ``generate`` would add work for every token that is not the model's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from protocol import serve
from transformers import AutoModelForCausalLM, DynamicCache

CHUNK = 1024  # whole prompts of several thousand tokens would ask for their square of memory


class Transformers:
    def __init__(self, arguments: list[str]) -> None:
        path, threads, _, model, self.cache = arguments
        torch.set_num_threads(int(threads))
        self.model = _load(Path(path), model).to(getattr(torch, self.cache)).eval()
        self.model.set_attn_implementation("sdpa")
        assert self.model.config._attn_implementation == "sdpa"

    def info(self) -> dict[str, Any]:
        return {"name": "transformers", "version": transformers.__version__, "weights": self.cache, "cache": self.cache}

    def _feed(self, cache: DynamicCache, ids: torch.Tensor) -> torch.Tensor:
        for start in range(0, ids.shape[1], CHUNK):
            part = ids[:, start : start + CHUNK]
            out = self.model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1)

    def prefill(self, prompt: list[int]) -> float:
        begin = perf_counter()
        with torch.inference_mode():
            self._feed(DynamicCache(), torch.tensor([prompt]))
        return perf_counter() - begin

    def decode(self, prompt: list[int], tokens: int, windows: int) -> list[float]:
        return self._run(torch.tensor([prompt]), tokens, windows)

    def batch(self, prompts: list[list[int]], prefix: int, tokens: int, windows: int) -> list[float]:
        """All prompts have one length; there is no way to share a prefix."""
        return self._run(torch.tensor(prompts), tokens, windows)

    def _run(self, ids: torch.Tensor, tokens: int, windows: int) -> list[float]:
        seconds = []
        with torch.inference_mode():
            cache = DynamicCache()
            current = self._feed(cache, ids)
            for _ in range(windows):
                begin = perf_counter()
                for _ in range(tokens):
                    current = self._feed(cache, current)
                seconds.append(perf_counter() - begin)
        return seconds


def _load(path: Path, model: str) -> Any:
    """The bundled models as the test suite builds them, which needs no further package; any other by transformers."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    import hf_models

    if model in hf_models.CONFIGS:
        return hf_models.bundled(path, hf_models.CONFIGS[model])
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)


if __name__ == "__main__":
    serve(Transformers)
