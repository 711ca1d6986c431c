"""Packed weights against unpacked ones, memory's limit and llama.cpp, in one run on one GGUF file: a table or JSON.

Takes turns: each round measures every contender once. Figures are of processor time with one thread (--threads 1, the
default: other work disturbs them little), or of the wall with more; the best of the rounds counts. ``--peer PYTHON`` is
an interpreter that has llama-cpp-python. Quality is the mean KL divergence to the same file unpacked to float32 with a
float32 cache, over the same tokens. Nothing here asserts on time.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.base.errors import OutOfMemory
from kvist.compose import open_model
from kvist.kernels.native import NativeBackend
from kvist.kernels.ops import Backend
from kvist.measure.limits import beyond_cache
from kvist.model.held import held_as
from kvist.model.weights import load_weights
from kvist.spec.source import resolve
from kvist.verify.compare import kl_divergence
from kvist.verify.course import Course, Subject
from kvist.verify.run import text_tokens

PROMPT, TOKENS, JUDGED = 512, 32, 256

PEER = """
import sys, json, ctypes, numpy as np
from time import perf_counter, process_time
import llama_cpp as L
path, threads, prompt, count, judged, out = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
tokens = json.loads(sys.stdin.readline())
quiet = L.llama_log_callback(lambda *a: None)
L.llama_log_set(quiet, None)
L.llama_backend_init()
m = L.llama_model_default_params(); m.n_gpu_layers = 0
model = L.llama_model_load_from_file(path.encode(), m)
vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
c = L.llama_context_default_params()
c.n_ctx, c.n_batch, c.n_ubatch = prompt + 64, 512, 512
c.n_threads = c.n_threads_batch = threads
c.flash_attn_type = 1
context = L.llama_init_from_model(model, c)
clock = process_time if threads == 1 else perf_counter
def feed(part, start, every):
    b = L.llama_batch_init(len(part), 0, 1); b.n_tokens = len(part)
    for i, t in enumerate(part):
        b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0] = t, start + i, 1, 0
        b.logits[i] = every or i == len(part) - 1
    assert L.llama_decode(context, b) == 0
    L.llama_batch_free(b)
def logits(i):
    at = ctypes.cast(L.llama_get_logits_ith(context, i), ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(at, shape=(vocab,)).copy()
def clear(): L.llama_memory_clear(L.llama_get_memory(context), True)
feed(tokens[:judged], 0, True)
np.save(out, np.stack([logits(i) for i in range(0, judged, 4)]))
print("ready", flush=True)
for line in sys.stdin:
    clear()
    begin = clock(); feed(tokens[:prompt], 0, False); logits(-1); prefill = clock() - begin
    clear(); feed(tokens[:4], 0, False)
    begin = clock()
    for i in range(count): feed(tokens[4 + i : 5 + i], 4 + i, False); logits(-1)
    print(json.dumps([prompt / prefill, count / (clock() - begin)]), flush=True)
"""


class Ours:
    """A model of this package, its weights held as ``form``."""

    def __init__(self, model: str, form: str, threads: int, variant: str | None, tokens: Sequence[int] = ()) -> None:
        source = resolve(model)
        spec, checkpoint, tokenizer = open_model(source)
        backend = NativeBackend(variant, threads)
        held = held_as(spec, checkpoint, backend, form)
        held.require_memory(model)
        begin = perf_counter()
        weights = load_weights(spec, checkpoint, backend, held.dtype, packed=held.packed)
        self.load_s, self.nbytes = perf_counter() - begin, weights.nbytes
        self.clock = process_time if threads == 1 else perf_counter
        self.tokens = list(tokens) or text_tokens(tokenizer, spec, PROMPT)

        def same(count: int | None) -> Backend:
            return backend

        def subject(kv: DType) -> Subject:
            return Subject(form, spec, weights, kv, same)

        self.subject = subject
        self.course = Course(subject(BFLOAT16), length=PROMPT + 64)

    def measure(self) -> tuple[float, float]:
        """Tokens per second of a prefill, and of decoding from depth 4."""
        lane = self.course.lane(self.tokens)
        begin = self.clock()
        self.course.feed([(lane, PROMPT)], keep=False)
        self.course.rows(PROMPT, [PROMPT - 1])
        prefill = self.clock() - begin
        lane.table.truncate(0)
        self.course.feed([(lane, 4)], keep=False)
        begin = self.clock()
        for _ in range(TOKENS):
            self.course.feed([(lane, 1)], keep=False)
            self.course.rows(1, [0])
        decode = self.clock() - begin
        lane.table.truncate(0)
        lane.table.release()
        self.course.lanes.clear()
        return PROMPT / prefill, TOKENS / decode

    def logits(self, kv: DType) -> torch.Tensor:
        """Of every fourth of the judged positions, with a cache of type ``kv``."""
        course = Course(self.subject(kv), length=JUDGED)
        course.feed([(course.lane(self.tokens), JUDGED)], keep=False)
        wanted = range(0, JUDGED, 4)
        return torch.cat([course.rows(JUDGED, wanted[i : i + 32]) for i in range(0, len(wanted), 32)])


class LlamaCpp:
    """llama.cpp in a process of its own, told token ids."""

    def __init__(self, python: str, path: Path, threads: int, tokens: Sequence[int]) -> None:
        self.file = tempfile.NamedTemporaryFile(suffix=".npy")  # noqa: SIM115  (lives as long as the process)
        arguments = [str(path), str(threads), str(PROMPT), str(TOKENS), str(JUDGED), self.file.name]
        self.process = subprocess.Popen(
            [python, "-c", PEER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ask(json.dumps(list(tokens)))

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def measure(self) -> tuple[float, float]:
        prefill, decode = json.loads(self._ask("go"))
        return prefill, decode

    def logits(self) -> torch.Tensor:
        return torch.from_numpy(np.load(self.file.name))


def run(model: str, threads: int, rounds: int, peer: str | None, variant: str | None, kl: bool) -> dict[str, Any]:
    """Every figure of one file."""
    torch.set_num_threads(threads)
    gc.disable()  # a full collection in the middle of a run costs more than a token
    contenders: dict[str, Ours | LlamaCpp] = {"packed": Ours(model, "packed", threads, variant)}
    ours = contenders["packed"]
    assert isinstance(ours, Ours)
    try:
        contenders["bfloat16"] = Ours(model, "bfloat16", threads, variant, ours.tokens)
    except OutOfMemory as error:
        print(error, file=sys.stderr)
    if peer is not None:
        contenders["llama.cpp"] = LlamaCpp(peer, resolve(model).path, threads, ours.tokens)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    reading: list[float] = []
    memory, native = np.ones(beyond_cache(), dtype=np.uint8), NativeBackend(None, threads).native
    clock = process_time if threads == 1 else perf_counter
    for _ in range(rounds):
        for name, contender in contenders.items():
            found[name].append(contender.measure())
        begin = clock()
        native.read_bandwidth(memory.ctypes.data, memory.nbytes, threads, 1)
        reading.append(memory.nbytes / (clock() - begin))
    best = {name: [max(value) for value in zip(*values, strict=True)] for name, values in found.items()}
    out: dict[str, Any] = {"model": model, "threads": threads, "read_gb_s": round(max(reading) / 1e9, 1)}
    exact = Ours(model, "float32", threads, variant, ours.tokens).logits(FLOAT32) if kl else None
    for name, contender in contenders.items():
        row: dict[str, Any] = {"prefill_tok_s": round(best[name][0]), "decode_tok_s": round(best[name][1], 1)}
        if isinstance(contender, Ours):
            row |= {"weight_bytes": contender.nbytes, "load_s": round(contender.load_s, 2)}
            row["decode_share_of_read_limit"] = round(best[name][1] * contender.nbytes / max(reading), 2)
        if exact is not None:
            logits = contender.logits(BFLOAT16) if isinstance(contender, Ours) else contender.logits()
            row["kl_to_float32"] = float(f"{kl_divergence(logits, exact):.2e}")
        if isinstance(contender, Ours) and exact is not None:
            row["kl_with_float32_cache"] = float(f"{kl_divergence(contender.logits(FLOAT32), exact):.2e}")
        out[name] = row
    return out


def main() -> None:
    """Measure the models named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["smollm2", "gemma3"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--variant", help="a kernel variant, default the best")
    parser.add_argument("--no-kl", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for model in arguments.models:
        found = run(model, arguments.threads, arguments.rounds, arguments.peer, arguments.variant, not arguments.no_kl)
        if arguments.json:
            print(json.dumps(found), flush=True)
            continue
        print(f"{model}, {found['threads']} threads, memory reads {found['read_gb_s']} GB/s")
        for name in ("packed", "bfloat16", "llama.cpp"):
            if name in found:
                print(f"  {name:<10}" + "  ".join(f"{key} {value}" for key, value in found[name].items()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
