"""Sizes that engines printed and papers published, from the planner's own engines. Misses are listed by number.

What these rows prove differs. The file also names the formula and the flags behind each size, and the engines here were
written with that in view: a match shows that the stated rule is reproduced, not that it was foreseen.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvist.plan.cost import Widths, kinds_of, sequence_bytes
from kvist.plan.engines.llama_cpp import LlamaCppSettings, llama_cpp_engine
from kvist.plan.engines.sglang import SglangSettings, sglang_engine
from kvist.plan.engines.vllm import VllmEngine, VllmSettings, vllm_engine
from kvist.plan.formats import FORMATS
from kvist.spec.cache_spec import cache_spec
from kvist.spec.kept import CacheSpec, CrossRows

DATA = Path(__file__).resolve().parents[2] / "data"
GIB, MIB = 2**30, 2**20

# Not asserted, because nothing that was published explains the report.
UNEXPLAINED = {
    106: "the log fits 29 layers, the published config has 28",
    114: "the log fits 29 layers, the published config has 28",
    181: "the slope fits 28 layer-equivalents, the published config has 24 latent layers",
}
# The table used an older revision of the checkpoint with twice the kv heads.
EXPLAINED = {173: "16 kv heads in the first revision; the published config has 8"}

# The file marks a setting or the model itself of these rows as inferred: reported together, not asserted one by one.
INFERRED = {17, 127, 128, 129, 130, 144, 154}

# Models that models.json does not hold. No published config was at hand: their fields were worked back from the sizes
# and notes of the rows themselves, so these rows test how cells and windows are counted, and not the geometry.
WORKED_BACK = {54, 55, 58, 73, 175}
EXTRA: dict[str, dict[str, Any]] = {
    "google/gemma-4-12B": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
    },
    "poolside/Laguna": {
        "model_type": "laguna",
        "num_hidden_layers": 48,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 512,
        "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12,
    },
    "inclusionAI/Ling-3.0-tiny": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
    "Jamba-1.5-Large": {
        "model_type": "jamba",
        "num_hidden_layers": 72,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_size": 8192,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
    },
}
ALIASES = {
    "moonshotai/Kimi-K2-Thinking": "moonshotai/Kimi-K2-Instruct",
    "Qwen/Qwen2-1.5B geometry (Qwen2.5-1.5B)": "Qwen/Qwen2-1.5B",
    "Qwen/Qwen2-0.5B geometry (Qwen2.5-0.5B) K only": "Qwen/Qwen2-0.5B",
    "Qwen3.x-27B": "Qwen/Qwen3.8-27B",
    "GLM-5.x DSA": "zai-org/GLM-5",
    "Qwen/Qwen3-VL-2B (cosmos": "Qwen/Qwen3-VL-2B-Instruct",
    "DeepSeek-V2": "deepseek-ai/DeepSeek-V2.5-1210 (GGUF)",
    "Qwen/Qwen3-0.6B (reranker)": "Qwen/Qwen3-0.6B",
    "Llama-3.1-70B W8A8 TP2": "meta-llama/Meta-Llama-3-70B",
}


@cache
def rows() -> dict[int, dict[str, str]]:
    with (DATA / "plan_sizes.tsv").open(encoding="utf-8") as file:
        return {int(row["n"]): row for row in csv.DictReader(file, delimiter="\t")}


@cache
def published() -> dict[str, dict[str, Any]]:
    models = json.loads((DATA / "plan_models.json").read_text(encoding="utf-8"))["models"]
    return {model["id"]: model["published"] for model in models}


@cache
def spec_of(name: str) -> CacheSpec:
    table = {**published(), **EXTRA}
    wanted = next((target for alias, target in ALIASES.items() if name.startswith(alias)), name)
    key = wanted if wanted in table else max((k for k in table if wanted.startswith(k)), key=len, default=None)
    assert key is not None, name
    flat = {k: v for k, v in table[key].items() if not k.startswith("_") or k == "_block_types"}
    return cache_spec(flat)


def widths(text: str, index_scale: int = 0) -> Widths:
    names = {"bf16": "bfloat16", "f16": "float16", "16-bit": "bfloat16", "fp32 ssm": "bfloat16", "bf16?": "bfloat16"}
    parts = [FORMATS[names.get(part, part).lower()] for part in text.split("/")]
    index = FORMATS["fp8"] if index_scale else FORMATS["bfloat16"]
    return Widths(parts[0], parts[-1], index=index, index_scale=index_scale)


# What the columns do not say in numbers: flags that the note or the "given" column mentions.
LLAMA: dict[int, LlamaCppSettings] = {
    42: LlamaCppSettings(latent="transposed"),
    43: LlamaCppSettings(latent="expanded"),
    44: LlamaCppSettings(latent="expanded"),
    47: LlamaCppSettings(latent="expanded"),
    48: LlamaCppSettings(ubatch=128),
    49: LlamaCppSettings(ubatch=2048),
    51: LlamaCppSettings(flash_attention=False),
    53: LlamaCppSettings(swa_full=True),
    54: LlamaCppSettings(ubatch=2048),
    57: LlamaCppSettings(swa_full=True),
    67: LlamaCppSettings(rollback_states=2),
    73: LlamaCppSettings(unified=False),
}
MTP3 = VllmSettings(speculative_tokens=3, draft_layers=1, checkpoints=False)
VLLM: dict[int, VllmSettings] = {
    102: VllmSettings(block_size=64),
    103: VllmSettings(block_size=64, decode_context_parallel=8),
    116: VllmSettings(hybrid_manager=False),
    120: MTP3,
    123: VllmSettings(alignment=64),
    126: MTP3,
    127: VllmSettings(speculative_tokens=1, draft_layers=1),
    128: VllmSettings(speculative_tokens=1, draft_layers=1),
    133: VllmSettings(hybrid_manager=False),
    134: MTP3,
    136: MTP3,
    137: MTP3,
    138: MTP3,
    140: MTP3,
    142: MTP3,
    143: VllmSettings(speculative_tokens=2, draft_layers=1),
    160: VllmSettings(block_size=32),
}
# Row 136 and 137 name the types of attention and of the state pages; the attention rows are the second.
VLLM_TYPES = {124: "bf16", 125: "bf16", 136: "int8_per_token_head", 137: "int8_per_token_head"}


def engine_of(number: int) -> VllmEngine:
    row = rows()[number]
    settings = VLLM.get(number, VllmSettings())
    settings = replace(settings, tensor_parallel=int(row["tensor_parallel"] or 1))
    chosen = widths(VLLM_TYPES.get(number, row["cache_dtype"]))
    if number == 123:
        chosen = replace(chosen, state=FORMATS["bfloat16"])
    return vllm_engine(spec_of(row["model"]), chosen, settings)


def memory_of(number: int) -> tuple[int, int]:
    """The least and the most bytes that the printed memory can stand for."""
    given = rows()[number]["given"].removeprefix("~").split()
    unit = 10**9 if given[1].startswith("GB") else GIB
    digits = len(given[0].partition(".")[2])
    half = 0 if digits == 0 else 0.5 * 10**-digits
    value = float(given[0])
    return int((value - half) * unit), int((value + half) * unit)


def within(number: int, low: float, high: float) -> bool:
    """The reported value lies between what the two ends of the printed memory give."""
    return low <= float(rows()[number]["reported"]) <= high


def printed(number: int, value: float) -> bool:
    """``value`` rounds to the digits that were printed."""
    text = rows()[number]["reported"]
    unit = 10.0 ** -len(text.partition(".")[2])
    return abs(value - float(text)) <= unit * 0.5 + 1e-9


def in_unit(number: int, nbytes: float) -> float:
    unit = rows()[number]["unit"]
    return nbytes / {"MiB": MIB, "GiB": GIB, "GB(=GiB)": GIB, "MB": 1e6, "bytes": 1, "B/token": 1, "B/seq": 1}.get(
        unit, 1024 if unit.startswith("KiB") else 1
    )


def llama(number: int) -> bool:
    row = rows()[number]
    engine = llama_cpp_engine(spec_of(row["model"]), widths(row["cache_dtype"]), LLAMA.get(number, LlamaCppSettings()))
    slots, ctx = int(row["sequences"]), int(row["ctx_or_tokens"])
    if row["unit"] == "SWA cells":
        (window,) = {p.bound for kind in engine.kinds for p in kind.pieces if p.bound}
        return engine.window_cells(ctx, window, slots) == int(row["reported"])
    return printed(number, in_unit(number, engine.cache_bytes(ctx, slots)))


def cross_or_self(number: int) -> bool:
    """whisper.cpp: the cells are given; the two caches are sized apart."""
    row = rows()[number]
    cross = "cross" in row["engine"]
    layers = [
        replace(layer, parts=tuple(p for p in layer.parts if isinstance(p, CrossRows) == cross))
        for layer in spec_of(row["model"]).layers
    ]
    if cross:
        layers = [
            replace(layer, parts=tuple(replace(p, tokens=int(row["ctx_or_tokens"])) for p in layer.parts))  # type: ignore[call-arg]
            for layer in layers
        ]
    size = sequence_bytes(kinds_of(layers, widths("f16")), int(row["ctx_or_tokens"]))
    return printed(number, in_unit(number, size))


def vllm(number: int) -> bool:
    row, engine = rows()[number], engine_of(number)
    if row["engine"] == "vLLM attention block size":
        return engine.block_size == int(row["reported"])
    if row["engine"] == "vLLM mamba page":
        spec = spec_of(row["model"])
        (state,) = {layer.parts for layer in spec.layers if layer.kind == "mamba2"}
        kinds = kinds_of([layer for layer in spec.layers if layer.parts == state][:1], widths("bf16"))
        return kinds[0].fixed == int(row["reported"])
    ctx = int(row["ctx_or_tokens"] or 0)
    if row["engine"] == "vLLM needed-per-request":
        total = engine.allocated(ctx, 1)
        if "draft" in row["model"]:
            draft = spec_of("meta-llama/Llama-3.2-3B")
            total += vllm_engine(draft, widths("bf16"), engine.settings).allocated(ctx, 1)
        return printed(number, in_unit(number, total))
    low, high = memory_of(number)
    if number == 133:
        # "About 50 GB" and "about 55,000 tokens": two digits each.
        return abs(engine.tokens(low, 1) / float(row["reported"]) - 1) < 0.01
    if row["unit"] == "x":
        return printed(number, engine.concurrency(low, ctx)) or printed(number, engine.concurrency(high, ctx))
    if row["engine"] == "vLLM estimated max length":
        return within(number, engine.estimated_max_len(low), engine.estimated_max_len(high))
    if number in (127, 129):
        return within(number, engine.tokens_by_groups(low), engine.tokens_by_groups(high))
    return within(number, engine.tokens(low, ctx), engine.tokens(high, ctx))


def sglang(number: int) -> bool:
    row = rows()[number]
    spec, tokens = spec_of(row["model"]), int(row["ctx_or_tokens"])
    settings = SglangSettings(page_size=64 if number == 154 else 1, spare_pages=1 if number == 154 else 0)
    chosen = widths(row["cache_dtype"])
    if number == 154:
        chosen = replace(chosen, latent_row=656, index=FORMATS["fp8"], index_scale=4)
    engine = sglang_engine(spec, chosen, settings)
    if row["unit"] == "bytes/cell":
        return engine.cell == float(row["reported"])
    total = engine.pool_bytes(tokens)
    return printed(number, in_unit(number, total / 2 if "K only" in row["model"] else total))


def paper(number: int) -> bool:
    row = rows()[number]
    spec = spec_of(row["model"].replace(" @256K", "").replace(" growing", "").replace(" conv", ""))
    kinds = kinds_of(spec.layers, widths("16-bit"))
    if row["unit"] in ("B/token", "KiB/token"):
        return printed(number, in_unit(number, float(sum(kind.growing for kind in kinds))))
    if row["unit"] == "K elements/token":
        return printed(number, float(sum(kind.growing for kind in kinds)) / 2 / 1000)
    if row["unit"] == "B/seq":
        return printed(number, sum(kind.fixed for kind in kinds))
    ctx = 262144 if "@256K" in row["model"] else int(row["ctx_or_tokens"])
    growing = sum(kind.nbytes(ctx) - kind.fixed for kind in kinds)
    return printed(number, in_unit(number, growing))


def check_of(engine: str) -> Callable[[int], bool]:
    if engine.startswith("whisper"):
        return cross_or_self
    if engine.startswith(("llama.cpp", "ik_llama", "ollama")):
        return llama
    if engine.startswith(("vLLM blog", "paper")):
        return paper
    return sglang if engine == "SGLang" else vllm


APART = {*UNEXPLAINED, *EXPLAINED, *INFERRED, *WORKED_BACK}


@pytest.mark.parametrize("number", sorted(set(rows()) - APART))
def test_size(number: int) -> None:
    assert check_of(rows()[number]["engine"])(number), rows()[number]


def test_what_is_explained_follows_from_its_explanation() -> None:
    row = rows()[173]
    spec = cache_spec({**published()["meta-llama/Meta-Llama-3.1-405B"], "num_key_value_heads": 16})
    assert sequence_bytes(kinds_of(spec.layers, widths("16-bit")), 262144) / GIB == float(row["reported"])


@pytest.mark.parametrize("number", sorted(WORKED_BACK))
def test_cells_of_a_geometry_worked_back_from_the_row(number: int) -> None:
    assert check_of(rows()[number]["engine"])(number), rows()[number]


def test_the_target_is_met() -> None:
    """105 of 109 match, the one that another revision explains and the inferred settings included."""
    assert len(rows()) == 109
    marked = {
        n for n, row in rows().items() if "inferred)" in row["match"] + row["model"] or "inferred:" in row["note"]
    }
    assert marked == INFERRED
    matched = {number for number in rows() if check_of(rows()[number]["engine"])(number)}
    assert len(matched | set(EXPLAINED)) >= 105
    assert not matched & set(UNEXPLAINED), "one is explained now"
