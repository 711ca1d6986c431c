"""``kvist bench``: a model measured through the engine as it is shipped, the machine's limits beside every figure."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter
from typing import Any

from kvist.base.dtypes import BFLOAT16, DTYPES, FLOAT32, DType
from kvist.base.machine import available_memory, processors
from kvist.cache.layout import Group, groups_of
from kvist.cache.sizing import BLOCK_SIZE, DEFAULT_CTX, STEP_TOKENS, pool_bytes
from kvist.compose import LLM, load, open_model
from kvist.kernels.dispatch import choose
from kvist.kernels.fingerprint import fingerprint
from kvist.kernels.ops import Backend
from kvist.measure.attention import AttentionRate, attention_rates, shapes
from kvist.measure.limits import Reading, Work, product_rate, read_bandwidth
from kvist.measure.rate import Clock, Rate, rate
from kvist.measure.serving import OWN_TOKENS, Prompts, Window, batch, decode, prefill
from kvist.measure.startup import Startup, measure_startup
from kvist.spec.source import resolve

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """What is measured, and how often. ``tokens`` are those of one window, ``seqs`` the requests of a batch."""

    prefills: tuple[int, ...] = (512, 4096)
    depths: tuple[int, ...] = (0, 1024, 4096, 7900)
    seqs: int = 8
    seq_depth: int = 1024
    tokens: int = 32
    repeats: int = 5
    starts: int = 3
    matrix: bool = True  # attention alone: every type and shape, not only the model's own


WHOLE = Effort()
QUICK = Effort(prefills=(512,), depths=(0, 1024), tokens=16, repeats=3, starts=1, matrix=False)


@dataclass(frozen=True, slots=True)
class Batch:
    """``requests`` requests together; ``shared_prefix`` tokens are the same in all of them."""

    requests: int
    depth: int
    shared_prefix: int
    rate: Rate


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured. Rates of serving are tokens per second, of reading GB (10^9 bytes) per second."""

    model: str
    kernels: str
    fingerprint: str
    threads: int
    weights: str
    dtype: str
    kv_cache_dtype: str
    weight_bytes: int
    bytes_per_token: int
    peak_rss_bytes: int
    reading: tuple[Reading, ...]
    product_flops: float
    prefill: tuple[tuple[int, Rate], ...]
    decode: tuple[tuple[int, Rate], ...]
    batch: tuple[Batch, ...]
    attention: tuple[AttentionRate, ...]
    startup: Startup
    left_out: tuple[str, ...]

    @property
    def read_gbps(self) -> float:
        """What this machine reads from memory at best: the limit of decoding."""
        return limit_of(self.reading)

    def json(self) -> dict[str, Any]:
        """One object; every rate with its extremes, its limit and the part of it that was reached."""
        return {
            "model": self.model,
            "kernels": self.kernels,
            "fingerprint": self.fingerprint,
            "threads": self.threads,
            "weights": self.weights,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "weight_bytes": self.weight_bytes,
            "bytes_per_token": self.bytes_per_token,
            "peak_rss_bytes": self.peak_rss_bytes,
            "read_gbps": self.read_gbps,
            "reading": [reading.json() for reading in self.reading],
            "product_gflops": self.product_flops / 1e9,
            "prefill": [{"tokens": tokens} | found.json("tok_s") for tokens, found in self.prefill],
            "decode": [{"depth": depth} | found.json("tok_s") for depth, found in self.decode],
            "batch": [
                {"requests": b.requests, "depth": b.depth, "shared_prefix": b.shared_prefix} | b.rate.json("tok_s")
                for b in self.batch
            ],
            "attention": [found.json() for found in self.attention],
            "startup": self.startup.json(),
            "left_out": list(self.left_out),
        }


def bench(
    model: str,
    effort: Effort = WHOLE,
    *,
    weights: str = "auto",
    announce: Announce = lambda text: None,
    clock: Clock = perf_counter,
) -> Report:
    """Measure ``model`` with its ``weights`` held as ``kvist.load`` takes the word; what that raises, this raises.

    ``announce`` is told what runs.
    """
    return _Bench(model, weights, effort, announce, clock).run()


def limit_of(reading: tuple[Reading, ...]) -> float:
    """GB/s from memory, by the best repeat: noise only ever takes away."""
    return max(found.rate.highest for found in reading if found.source == "ram")


@dataclass(frozen=True, slots=True)
class _Measured:
    """Windows of one figure, before the limit is known."""

    windows: tuple[Window, ...]

    def rate(self, limit: Callable[[float], float]) -> Rate:
        depth = sum(window.depth for window in self.windows) / len(self.windows)
        return rate([window.tok_s for window in self.windows], limit(depth))


class _Bench:
    def __init__(self, model: str, weights: str, effort: Effort, announce: Announce, clock: Clock) -> None:
        self.model, self.weights, self.effort = model, weights, effort
        self.announce, self.clock = announce, clock
        self.left_out: list[str] = []

    def run(self) -> Report:
        # The engine goes first: the peak of memory is then its own.
        self.announce(f"{self.model}: loading")
        llm = self._load()
        setup = llm.setup
        assert setup is not None
        prefills, decodes, batches = self._serve(llm)
        peak = peak_rss()
        groups, dtype = llm.engine.groups, DTYPES[setup.dtype]
        work = Work(setup.spec, groups, setup.weight_bytes, dtype)
        llm.close()
        del llm
        backend = choose().backend
        threads = int(getattr(backend, "threads", processors()))
        counts = sorted({1, threads})
        self.announce("reading memory")
        reading = read_bandwidth(backend, counts, self.clock, self.effort.repeats)
        self.announce("products")
        flops = product_rate(backend, dtype, self.clock, self.effort.repeats)
        attention = self._attention(backend, work, DTYPES[setup.kv_cache_dtype], limit_of(tuple(reading)), flops)
        # Once more: what else the machine did in between must not lower the limit.
        reading = _best(reading, read_bandwidth(backend, counts, self.clock, self.effort.repeats))
        bandwidth = limit_of(tuple(reading)) * 1e9
        self.announce("start-up")
        startup = measure_startup(self.model, self.weights, self.clock, self.effort.starts)

        def step_limit(requests: int, shared: int = 0) -> Callable[[float], float]:
            return lambda depth: requests * bandwidth / work.step_bytes([depth] * requests, shared)

        return Report(
            model=self.model,
            kernels=setup.kernels,
            fingerprint=fingerprint(backend),
            threads=threads,
            weights=setup.weights,
            dtype=setup.dtype,
            kv_cache_dtype=setup.kv_cache_dtype,
            weight_bytes=setup.weight_bytes,
            bytes_per_token=setup.bytes_per_token,
            peak_rss_bytes=peak,
            reading=tuple(reading),
            product_flops=flops,
            prefill=tuple(
                (tokens, found.rate(lambda _, n=tokens: n * flops / work.prefill_operations(n)))  # type: ignore[misc]
                for tokens, found in prefills.items()
            ),
            decode=tuple((depth, found.rate(step_limit(1))) for depth, found in decodes.items()),
            batch=tuple(
                Batch(self.effort.seqs, self.effort.seq_depth, shared, found.rate(step_limit(self.effort.seqs, shared)))
                for shared, found in batches.items()
            ),
            attention=tuple(attention),
            startup=startup,
            left_out=tuple(self.left_out),
        )

    @property
    def _most(self) -> int:
        """Tokens that a request of a batch may give: the windows, and what comes while others are prefilled."""
        effort = self.effort
        waiting = -(-effort.seqs * (effort.seq_depth + OWN_TOKENS) // (STEP_TOKENS - effort.seqs)) + effort.seqs
        return effort.tokens * (effort.repeats + 1) + waiting

    def _load(self) -> LLM:
        """The model as shipped, but for a pool in which the requests of a batch are apart, if there is room for it."""
        spec = open_model(resolve(self.model))[0]
        exact = spec.dtype == FLOAT32.name or choose().backend.name == "reference"
        groups = groups_of(spec, DTYPES.get(self.weights, FLOAT32 if exact else BFLOAT16), BLOCK_SIZE)
        each = self.effort.seq_depth + OWN_TOKENS + self._most
        # The pool is cut by tokens, so that a window layer gets as many blocks as one that sees everything.
        blocks = self.effort.seqs * -(-each // BLOCK_SIZE)
        memory = pool_bytes(groups, [blocks] * len(groups))
        default = load(self.model, weights=self.weights) if memory > (available_memory() or memory) // 2 else None
        if default is not None:
            self.left_out.append(f"batches: {self.effort.seqs} requests apart take {memory} bytes of cache")
            self.effort = replace(self.effort, seqs=0)
            return default
        return load(self.model, weights=self.weights, memory=max(memory, self._smallest(groups, spec.max_position)))

    @staticmethod
    def _smallest(groups: Sequence[Group], most: int) -> int:
        """Bytes of one whole context: no pool may be smaller."""
        ctx = min(most, DEFAULT_CTX)
        return pool_bytes(groups, [-(-ctx // BLOCK_SIZE)] * len(groups))

    def _serve(self, llm: LLM) -> tuple[dict[int, _Measured], dict[int, _Measured], dict[int, _Measured]]:
        effort, clock = self.effort, self.clock
        assert llm.setup is not None
        ctx = llm.setup.ctx_size
        prompts = Prompts(llm, max(*effort.prefills, *effort.depths, effort.seq_depth))
        self.announce("warming up")
        for _ in range(2):
            prefill(llm, prompts, min(64, ctx), clock)
        prefills, decodes, batches = {}, {}, {}
        for tokens in effort.prefills:
            if self._fits(f"prefill of {tokens}", tokens, ctx):
                self.announce(f"prefill of {tokens} tokens")
                repeats = effort.repeats if tokens <= 1024 else max(1, effort.repeats - 2)
                prefills[tokens] = _Measured(tuple(prefill(llm, prompts, tokens, clock) for _ in range(repeats)))
        for depth in effort.depths:
            if self._fits(f"decode at depth {depth}", max(depth, 1) + (effort.repeats + 1) * effort.tokens, ctx):
                self.announce(f"decode at depth {depth}")
                with closing(decode(llm, prompts, depth, effort.tokens, clock)) as windows:
                    decodes[depth] = _Measured(tuple(islice(windows, effort.repeats)))
        for shared in (0, effort.seq_depth) if effort.seqs else ():
            if self._fits("a batch", effort.seq_depth + OWN_TOKENS + self._most, ctx):
                how = "one prefix" if shared else "apart"
                self.announce(f"{effort.seqs} requests at depth {effort.seq_depth}, {how}")
                size, most = (effort.seqs, effort.seq_depth, effort.tokens), self._most
                with closing(batch(llm, prompts, *size, clock, shared=bool(shared), most=most)) as windows:
                    batches[shared] = _Measured(tuple(islice(windows, effort.repeats)))
        return prefills, decodes, batches

    def _attention(
        self, backend: Backend, work: Work, kv_dtype: DType, limit: float, flops: float
    ) -> list[AttentionRate]:
        wanted = shapes(work.spec, kv_dtype, everything=self.effort.matrix)
        if backend.name == "reference":
            self.left_out.append("attention alone: the reference kernels were not made to be fast")
            return []
        self.announce(f"attention alone, {len(wanted)} shapes")
        return attention_rates(backend, wanted, limit, self.clock, self.effort.repeats, flops)

    def _fits(self, what: str, tokens: int, ctx: int) -> bool:
        if tokens <= ctx:
            return True
        self.left_out.append(f"{what}: needs {tokens} tokens, this model has a context of {ctx}")
        return False


def _best(first: list[Reading], second: list[Reading]) -> list[Reading]:
    """Of two measurements of the same thing the faster."""
    return [a if a.rate.highest >= b.rate.highest else b for a, b in zip(first, second, strict=True)]


def peak_rss() -> int:
    """The most bytes of memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
