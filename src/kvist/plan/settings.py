"""What a plan is asked for, and the engine that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvist.base.errors import UsageError
from kvist.cache.addressing import check_block_size
from kvist.cache.sizing import BLOCK_SIZE
from kvist.plan.cost import Widths
from kvist.plan.engines.base import Engine
from kvist.plan.engines.kvist_pool import kvist_engine
from kvist.plan.engines.llama_cpp import LlamaCppSettings, llama_cpp_engine
from kvist.plan.engines.sglang import SglangSettings, sglang_engine
from kvist.plan.engines.vllm import VllmSettings, vllm_engine
from kvist.plan.formats import FORMATS, Format, parse_format
from kvist.spec.kept import CacheSpec, IndexRows

GIB = 2**30
ENGINES = ("kvist", "vllm", "sglang", "llama.cpp")
# The share of memory that an engine takes, and bytes beside weights and cache (least, most): runtime, activations.
UTILISATION = {"kvist": 1.0, "vllm": 0.92, "sglang": 0.88, "llama.cpp": 1.0}
OTHER = {
    "kvist": (GIB // 4, 3 * GIB // 4),
    "vllm": (GIB, 4 * GIB),
    "sglang": (GIB, 4 * GIB),
    "llama.cpp": (GIB // 4, 3 * GIB // 2),
}


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Everything that can be asked. ``ctx_size`` and ``max_num_seqs`` None mean: the default, or what fits.

    ``ctx_size`` 0 stands for the model's longest context. ``engine_flags`` are the fields of the engine's own settings
    record. ``other_bytes`` replaces the assumed range when it was measured.
    """

    ctx_size: int | None = None
    max_num_seqs: int = 1
    kv_cache_dtype: str = "auto"
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    memory: int | None = None
    kv_cache_memory: int | None = None
    device: str | None = None
    tensor_parallel: int = 1
    engine: str = "kvist"
    weights_dtype: str | None = None
    block_size: int | None = None
    source_tokens: int | None = None
    utilisation: float | None = None
    other_bytes: tuple[int, int] | None = None
    engine_flags: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be planned (UsageError names the option and what is allowed)."""
        if self.engine not in ENGINES:
            raise UsageError(f"unknown engine {self.engine!r}: use one of {', '.join(ENGINES)}")
        limits = {"max_num_seqs": 2**24, "tensor_parallel": 4096}
        for name, most in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise UsageError(f"{name} is {value!r}: use a whole number from 1 to {most}")
        for name in ("memory", "kv_cache_memory", "block_size", "source_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 2**60):
                raise UsageError(f"{name} is {value!r}: use a whole number above 0")
        ctx = self.ctx_size
        if ctx is not None and (isinstance(ctx, bool) or not isinstance(ctx, int) or not 0 <= ctx <= 2**40):
            raise UsageError(f"ctx_size is {ctx!r}: use a whole number of tokens, or max")
        if self.utilisation is not None and not 0 < self.utilisation <= 1:
            raise UsageError(f"memory utilisation is {self.utilisation}: it must be above 0 and at most 1")
        if self.memory is not None and self.kv_cache_memory is not None:
            raise UsageError(
                "memory and kv_cache_memory are both given: the second is what is left of the first; drop one"
            )
        if self.kv_cache_dtype != "auto" and (self.cache_type_k or self.cache_type_v):
            raise UsageError(
                "kv_cache_dtype and cache_type_k / cache_type_v contradict each other: give one or the other"
            )


@dataclass(frozen=True, slots=True)
class Types:
    """The cache types of a plan and where they came from."""

    k: Format
    v: Format
    source: str
    assumed: str | None = None

    @property
    def name(self) -> str:
        """One name, or both where keys and values differ."""
        return self.k.name if self.k == self.v else f"{self.k.name}/{self.v.name}"


def choose_types(spec: CacheSpec, settings: PlanSettings) -> Types:
    """The types asked for; ``auto`` is the model's own where the engine can store it, and says what it is."""
    engine = settings.engine
    k, v = settings.cache_type_k, settings.cache_type_v
    if k or v:
        default = "float16" if engine == "llama.cpp" else "bfloat16"
        both = parse_format(k or default, engine), parse_format(v or default, engine)
        if engine == "kvist" and both[0] != both[1]:
            raise UsageError("kvist stores keys and values in one type: give --kv-cache-dtype")
        return Types(*both, "as asked")
    if settings.kv_cache_dtype != "auto":
        chosen = parse_format(settings.kv_cache_dtype, engine)
        return Types(chosen, chosen, "as asked")
    if engine == "llama.cpp":
        return Types(FORMATS["float16"], FORMATS["float16"], "the engine's default")
    if spec.dtype in ("bfloat16", "float16") or (spec.dtype == "float32" and engine == "kvist"):
        own = FORMATS[spec.dtype]
        return Types(own, own, f"the model's own ({spec.dtype_source})")
    why = spec.dtype_source if spec.dtype is None else f"the model's own is {spec.dtype} ({spec.dtype_source})"
    return Types(FORMATS["bfloat16"], FORMATS["bfloat16"], "assumed", f"cache type bfloat16: {why}")


def choose_widths(spec: CacheSpec, types: Types, settings: PlanSettings) -> Widths:
    """Bytes of every element as the engine writes it."""
    conv = FORMATS["float16"] if types.k.name == "float16" else FORMATS["bfloat16"]
    widths = Widths(types.k, types.v, conv=conv)
    indexed = any(isinstance(part, IndexRows) for layer in spec.layers for part in layer.parts)
    if settings.engine in ("vllm", "sglang") and indexed:
        # Both store an indexer's key as fp8 with one float32 scale, and pack an fp8 latent beside a 16-bit rope key.
        packed = types.k.name == "fp8" and any(layer.kind == "mla" for layer in spec.layers)
        widths = replace(widths, index=FORMATS["fp8"], index_scale=4, latent_row=656 if packed else None)
    return widths


def make_engine(spec: CacheSpec, types: Types, settings: PlanSettings) -> Engine:
    """The engine that was asked for, with its flags. UsageError for a flag that it does not have."""
    widths, flags = choose_widths(spec, types, settings), dict(settings.engine_flags)
    source = settings.source_tokens
    match settings.engine:
        case "kvist":
            block = settings.block_size or BLOCK_SIZE
            check_block_size(block)
            _only(flags, (), "kvist")
            return kvist_engine(spec, types.k.name, widths, block, settings.tensor_parallel, source)
        case "vllm":
            _only(flags, tuple(f.name for f in fields(VllmSettings)), "vllm")
            latent = any(layer.kind == "mla" for layer in spec.layers)
            block = settings.block_size or (64 if latent else 16)
            chosen = VllmSettings(**{"block_size": block, "tensor_parallel": settings.tensor_parallel, **flags})
            return vllm_engine(spec, widths, chosen, source)
        case "sglang":
            _only(flags, tuple(f.name for f in fields(SglangSettings)), "sglang")
            page = settings.block_size or 1
            pools = SglangSettings(**{"page_size": page, "tensor_parallel": settings.tensor_parallel, **flags})
            return sglang_engine(spec, widths, pools, source)
    _only(flags, tuple(f.name for f in fields(LlamaCppSettings)), "llama.cpp")
    if settings.tensor_parallel != 1:
        raise UsageError("llama.cpp splits layers over devices, which changes no sum: drop --tensor-parallel")
    return llama_cpp_engine(spec, widths, LlamaCppSettings(**flags), source)


def _only(flags: Mapping[str, Any], allowed: tuple[str, ...], engine: str) -> None:
    unknown = sorted(set(flags) - set(allowed))
    if unknown:
        raise UsageError(f"{engine} has no setting {', '.join(unknown)}: it has {', '.join(allowed) or 'none'}")
