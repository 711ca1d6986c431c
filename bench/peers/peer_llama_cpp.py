"""llama.cpp through the low-level half of llama-cpp-python. Arguments: GGUF THREADS CTX LABEL CACHE_TYPE.

Flash attention on, as it is needed to be fast; the cache in half precision, its own default, or bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import llama_cpp as L
import numpy as np
from protocol import serve

CACHE_TYPES = {"float16": 1, "bfloat16": 30, "float32": 0}  # of ggml
SEQUENCES = 8


class LlamaCpp:
    def __init__(self, arguments: list[str]) -> None:
        path, threads, ctx, self.label, self.cache = arguments
        self.threads, self.ctx_size = int(threads), int(ctx)
        L.llama_backend_init()
        settings = L.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = L.llama_model_load_from_file(path.encode(), settings)
        if not self.model:
            raise RuntimeError(f"llama.cpp did not load {path}")
        self.vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.model))
        self.single = self._context(self.ctx_size, 1, unified=True)
        self.several: dict[bool, Any] = {}

    def info(self) -> dict[str, Any]:
        return {"name": "llama.cpp", "version": L.__version__, "weights": self.label, "cache": self.cache}

    def _context(self, tokens: int, sequences: int, *, unified: bool) -> Any:
        settings = L.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = tokens, sequences
        settings.n_batch, settings.n_ubatch = 2048, 512
        settings.n_threads = settings.n_threads_batch = self.threads
        settings.type_k = settings.type_v = CACHE_TYPES[self.cache]
        settings.flash_attn_type = 1
        if hasattr(settings, "kv_unified"):
            settings.kv_unified = unified
        made = L.llama_init_from_model(self.model, settings)
        if not made:
            raise RuntimeError("llama.cpp made no context")
        return made

    def _feed(self, context: Any, tokens: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> list[int]:
        """Run (token, position, sequence) triples in one batch; the likeliest token behind each wanted index."""
        batch = L.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        chosen = set(wanted)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = i in chosen
        code = L.llama_decode(context, batch)
        L.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode gave {code}")
        return [self._best(context, i) for i in wanted]

    def _best(self, context: Any, index: int) -> int:
        logits = L.llama_get_logits_ith(context, index)
        array = np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), shape=(self.vocab,))
        return int(array.argmax())

    def _prompt(self, context: Any, prompt: Sequence[int], sequence: int = 0, start: int = 0) -> int:
        token = 0
        for first in range(0, len(prompt), 2048):
            part = prompt[first : first + 2048]
            last = first + len(part) == len(prompt)
            triples = [(t, start + first + i, sequence) for i, t in enumerate(part)]
            found = self._feed(context, triples, [len(part) - 1] if last else [])
            token = found[0] if last else 0
        return token

    def prefill(self, prompt: list[int]) -> float:
        L.llama_memory_clear(L.llama_get_memory(self.single), False)
        begin = perf_counter()
        self._prompt(self.single, prompt)
        return perf_counter() - begin

    def decode(self, prompt: list[int], tokens: int, windows: int) -> list[float]:
        L.llama_memory_clear(L.llama_get_memory(self.single), False)
        token, position = self._prompt(self.single, prompt), len(prompt)
        seconds = []
        for _ in range(windows):
            begin = perf_counter()
            for _ in range(tokens):
                token = self._feed(self.single, [(token, position, 0)], [0])[0]
                position += 1
            seconds.append(perf_counter() - begin)
        return seconds

    def batch(self, prompts: list[list[int]], prefix: int, tokens: int, windows: int) -> list[float]:
        shared = prefix > 0
        if shared not in self.several:
            room = SEQUENCES * (max(map(len, prompts)) + tokens * windows + 64)
            self.several[shared] = self._context(-(-room // 256) * 256, SEQUENCES, unified=shared)
        context = self.several[shared]
        memory = L.llama_get_memory(context)
        L.llama_memory_clear(memory, False)
        current = []
        for i, prompt in enumerate(prompts):
            if shared and i:
                L.llama_memory_seq_cp(memory, 0, i, 0, prefix)
                current.append(self._prompt(context, prompt[prefix:], i, prefix))
            elif shared:
                self._prompt(context, prompt[:prefix])
                current.append(self._prompt(context, prompt[prefix:], 0, prefix))
            else:
                current.append(self._prompt(context, prompt, i))
        positions = [len(prompt) for prompt in prompts]
        seconds = []
        for _ in range(windows):
            begin = perf_counter()
            for _ in range(tokens):
                triples = [(token, positions[i], i) for i, token in enumerate(current)]
                current = self._feed(context, triples, range(len(triples)))
                positions = [position + 1 for position in positions]
            seconds.append(perf_counter() - begin)
        return seconds


if __name__ == "__main__":
    serve(LlamaCpp)
