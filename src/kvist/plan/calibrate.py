"""Start-up lines of engines: what they allocated, what was not K and V, and how far the planner was off."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kvist.base.errors import UsageError

_NUMBER = r"([\d][\d,]*\.?\d*)"
_GIB, _MIB = 2**30, 2**20
# (name, pattern, unit). The unit of a count is 1.
_LINES: tuple[tuple[str, str, int], ...] = (
    ("kv_bytes", rf"Available KV cache memory: {_NUMBER} GiB", _GIB),
    ("kv_bytes", rf"reserved for KV Cache is {_NUMBER}GiB", _GIB),
    ("kv_tokens", rf"GPU KV cache size: {_NUMBER} tokens", 1),
    ("concurrency", rf"Maximum concurrency for [\d,]+ tokens per request: {_NUMBER}x", 1),
    ("max_model_len", rf"Maximum concurrency for {_NUMBER} tokens per request", 1),
    ("needed_bytes", rf"\({_NUMBER} GiB KV cache is needed", _GIB),
    ("needed_tokens", rf"max seq len \({_NUMBER}\)", 1),
    ("weights_bytes", rf"[Mm]odel (?:loading took|weights take) {_NUMBER} ?Gi?B", _GIB),
    ("other_bytes", rf"non_torch_memory takes {_NUMBER}GiB", _GIB),
    ("other_bytes", rf"PyTorch activation peak memory takes {_NUMBER}GiB", _GIB),
    ("other_bytes", rf"Graph capturing finished in .* took {_NUMBER} GiB", _GIB),
    ("sglang_tokens", rf"KV Cache is allocated\..*?#tokens: {_NUMBER}", 1),
    ("sglang_bytes", rf"K size: {_NUMBER} GB", _GIB),
    ("sglang_bytes", rf"V size: {_NUMBER} GB", _GIB),
    ("sglang_bytes", rf"KV size: {_NUMBER} GB", _GIB),
    ("llama_bytes", rf"llama_kv_cache\w*: size =\s*{_NUMBER} MiB", _MIB),
    ("llama_bytes", rf"llama_memory_recurrent: size =\s*{_NUMBER} MiB", _MIB),
    ("llama_cells", rf"size =\s*[\d.]+ MiB \(\s*{_NUMBER} cells", 1),
    ("other_bytes", rf"compute buffer size =\s*{_NUMBER} MiB", _MIB),
    ("weights_bytes", rf"model buffer size =\s*{_NUMBER} MiB", _MIB),
)
_ADDED = {"other_bytes", "sglang_bytes", "llama_bytes", "weights_bytes"}


@dataclass(frozen=True, slots=True)
class Calibration:
    """Numbers of a start-up log by name; ``other_bytes`` is what was neither weights nor cache."""

    engine: str
    found: dict[str, float] = field(repr=False)

    @property
    def other_bytes(self) -> int | None:
        """Bytes beside weights and cache, or None when the log does not say."""
        value = self.found.get("other_bytes")
        return None if value is None else int(value)

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of the cache, or None when the log does not say."""
        value = self.found.get("kv_bytes") or self.found.get("sglang_bytes") or self.found.get("llama_bytes")
        return None if value is None else int(value)

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the cache holds, as printed, or None."""
        value = self.found.get("kv_tokens") or self.found.get("sglang_tokens")
        return None if value is None else int(value)


def read_log(text: str) -> Calibration:
    """The numbers in an engine's start-up lines. UsageError when no line is known."""
    found: dict[str, float] = {}
    for name, pattern, unit in _LINES:
        values = [float(match.replace(",", "")) * unit for match in re.findall(pattern, text)]
        if values and name in _ADDED:
            # Several buffers add up; several tries of the same line do not.
            found[name] = found.get(name, 0.0) + sum(dict.fromkeys(values))
        elif values:
            found.setdefault(name, values[-1])
    if not found:
        raise UsageError(
            "the log holds no start-up line that is known: lines of vLLM (KV cache memory), SGLang (KV Cache is"
            " allocated) or llama.cpp (llama_kv_cache: size) are"
        )
    engine = "llama.cpp" if "llama_bytes" in found else "sglang" if "sglang_tokens" in found else "vllm"
    return Calibration(engine, found)
