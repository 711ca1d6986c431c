"""Element types of caches, here and in other engines: how many bytes a row of a given width takes."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.base.errors import UsageError


@dataclass(frozen=True, slots=True)
class Format:
    """``elements`` neighbours take ``nbytes`` bytes, and every row of a head ``row_extra`` more (its own scale)."""

    name: str
    elements: int
    nbytes: int
    row_extra: int = 0

    @property
    def bits(self) -> float:
        """Bits of one element, without what a row adds."""
        return self.nbytes * 8 / self.elements

    def rows(self, count: int, width: int) -> int:
        """Bytes of ``count`` rows of ``width`` elements side by side; UsageError when blocks do not divide them."""
        total = count * width
        if total % self.elements:
            raise UsageError(
                f"{self.name} stores {self.elements} elements together, which do not divide a row of {total}:"
                " use a type with smaller blocks"
            )
        return total // self.elements * self.nbytes + count * self.row_extra


_FLOATS = (Format("float32", 1, 4), Format("bfloat16", 1, 2), Format("float16", 1, 2))
_VLLM = (
    Format("fp8", 1, 1),
    Format("fp8_per_token_head", 1, 1, 4),
    Format("int8_per_token_head", 1, 1, 4),
    Format("int4_per_token_head", 2, 1, 4),
)
_GGML = (
    Format("q8_0", 32, 34),
    Format("q5_1", 32, 24),
    Format("q5_0", 32, 22),
    Format("q4_1", 32, 20),
    Format("q4_0", 32, 18),
    Format("iq4_nl", 32, 18),
)
_IK = (Format("q6_0", 32, 26), Format("q8_kv", 1, 1, 8))
FORMATS = {form.name: form for form in (*_FLOATS, *_VLLM, *_GGML, *_IK)}
_SHORT = {
    "f32": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float": "float32",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
}
# What each engine can store.
ALLOWED: dict[str, tuple[str, ...]] = {
    "kvist": tuple(form.name for form in _FLOATS),
    "vllm": tuple(form.name for form in (*_FLOATS, *_VLLM)),
    "sglang": (*(form.name for form in _FLOATS), "fp8"),
    "llama.cpp": (*(form.name for form in (*_FLOATS, *_GGML)),),
    "ik_llama.cpp": tuple(form.name for form in (*_FLOATS, *_GGML, *_IK)),
}


def parse_format(name: str, engine: str) -> Format:
    """The format called ``name`` (long or usual short form) that ``engine`` can store; UsageError lists them."""
    lower = name.lower()
    found = FORMATS.get(_SHORT.get(lower, lower))
    if found is None or found.name not in ALLOWED[engine]:
        raise UsageError(f"{engine} has no cache type {name!r}: use one of {', '.join(ALLOWED[engine])}")
    return found
