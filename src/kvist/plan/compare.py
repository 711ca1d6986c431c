"""A plan held against what an engine printed when it started."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.plan.calibrate import Calibration
from kvist.plan.engines.llama_cpp import LlamaCppEngine
from kvist.plan.engines.sglang import SglangEngine
from kvist.plan.engines.vllm import VllmEngine
from kvist.plan.record import Plan
from kvist.plan.sizes import show_bytes, show_count


@dataclass(frozen=True, slots=True)
class Comparison:
    """One printed number beside the planned one. ``off`` is planned / printed - 1."""

    what: str
    printed: float
    planned: float
    unit: str

    @property
    def off(self) -> float:
        """The relative difference."""
        return self.planned / self.printed - 1 if self.printed else 0.0

    @property
    def sentence(self) -> str:
        """As a line of a report."""
        show = show_bytes if self.unit == "bytes" else show_count
        return f"{self.what}: printed {show(self.printed)}, planned {show(self.planned)}, off by {self.off:+.2%}"


def compare(plan: Plan, log: Calibration) -> tuple[Comparison, ...]:
    """Every number that both the log and the plan have."""
    engine, found, items = plan.engine, log.found, []
    kv, tokens = log.kv_bytes, log.kv_tokens
    if isinstance(engine, VllmEngine):
        length = int(found.get("max_model_len") or found.get("needed_tokens") or plan.ctx_size)
        if kv and tokens:
            items.append(Comparison("tokens in the cache", tokens, engine.tokens(kv, length), "tokens"))
        if kv and "concurrency" in found:
            items.append(Comparison("concurrency", found["concurrency"], engine.concurrency(kv, length), "times"))
        if "needed_bytes" in found:
            needed = engine.allocated(length, 1)
            items.append(Comparison(f"cache of {length} tokens", found["needed_bytes"], needed, "bytes"))
    if isinstance(engine, SglangEngine) and kv and tokens:
        items.append(Comparison("cache", kv, engine.pool_bytes(tokens), "bytes"))
    if isinstance(engine, LlamaCppEngine) and kv:
        items.append(Comparison("cache", kv, plan.allocated_bytes, "bytes"))
    if "weights_bytes" in found and plan.weights_bytes:
        items.append(Comparison("weights", found["weights_bytes"], plan.weights_bytes, "bytes"))
    return tuple(items)
