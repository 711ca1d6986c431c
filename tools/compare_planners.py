"""The textbook formula, hf-mem, kvfit and kvist on the same published configs: who is right, wrong, or refuses.

Needs hf-mem and kvfit beside kvist: ``python -m venv scratch; scratch/bin/pip install hf-mem kvfit``, then
``PYTHONPATH=src scratch/bin/python tools/compare_planners.py``. Prints the Markdown of ``docs/plan.md``. The reference
is the bytes that follow from the published fields (``tests/data/plan_models.json``): one sequence, 16-bit cache, states
as float32 with a 16-bit convolution tail, indexer keys in 16 bits. An answer is right within 1 %.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size
from kvfit.architectures import estimate_cache

from kvist.plan.plan import plan

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "plan_models.json"
CTX = 32768
SHOWN = (
    "meta-llama/Llama-3.2-3B",
    "HuggingFaceTB/SmolLM2-135M",
    "Qwen/Qwen3-32B",
    "google/gemma-3-12b-it",
    "google/gemma-4-31B-it",
    "openai/gpt-oss-20b",
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V4-Flash",
    "zai-org/GLM-5.2",
    "moonshotai/Kimi-K3",
    "Qwen/Qwen3.6-27B",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "MiniMaxAI/MiniMax-M3",
    "XiaomiMiMo/MiMo-V2-Flash",
    "tencent/Hunyuan-Large",
)


def nested(published: Mapping[str, Any]) -> dict[str, Any]:
    """The config as published, nested where it was."""
    flat = {key: value for key, value in published.items() if not key.startswith(("_nested", "_outer"))}
    if published.get("_nested_in") is None:
        return flat
    outer = {key.removeprefix("_outer_"): value for key, value in published.items() if key.startswith("_outer_")}
    return {**outer, published["_nested_in"]: flat}


def reference(model: Mapping[str, Any]) -> float | None:
    """Bytes of one sequence of CTX tokens; None where the file itself doubts its figure."""
    derived = model["derived"]
    if "upper bound" in model["notes"] or "not text tokens" in model["notes"]:
        return None
    windows = derived.get("windows", [])
    size = derived["growing_bytes_per_token_16bit"] * CTX
    size += derived.get("windowed_bytes_per_token_16bit", 0) * min([CTX, *windows])
    size += derived.get("indexer_bytes_per_token", {}).get("bf16", 0) * CTX
    size += derived.get("state_bytes_per_seq", {}).get("fp32_ssm_bf16_conv", 0)
    return float(size + derived.get("cross", {}).get("bytes_16bit", 0))


def textbook(config: dict[str, Any]) -> float:
    """2 x layers x kv heads x hidden / heads x 2 bytes."""
    text = config.get("text_config", config)
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    return 2 * text["num_hidden_layers"] * kv_heads * (text["hidden_size"] / heads) * 2 * CTX


def hf_mem(config: dict[str, Any]) -> float:
    """The function of hf-mem, given the language model's own fields."""
    return float(compute_safetensors_kv_cache_size(config.get("text_config", config), "BF16", CTX))


def kvfit(config: dict[str, Any]) -> float:
    """The function of kvfit."""
    return float(estimate_cache(config, context_tokens=CTX).total_bytes)


def kvist(config: dict[str, Any]) -> float:
    """kvist's own answer."""
    return float(plan(config, ctx_size=CTX, kv_cache_dtype="bfloat16").sequence_bytes)


TOOLS: dict[str, Callable[[dict[str, Any]], float]] = {
    "textbook": textbook,
    "hf-mem": hf_mem,
    "kvfit": kvfit,
    "kvist": kvist,
}


def answer(tool: str, config: dict[str, Any], truth: float) -> tuple[str, str]:
    """(right, wrong or refused; the cell of the table)."""
    try:
        value = TOOLS[tool](config)
    except Exception as error:  # A crash of another tool counts as a refusal.
        return "refused", f"refused ({type(error).__name__})"
    ratio = value / truth if truth else float(value == truth)
    return ("right", "right") if abs(ratio - 1) <= 0.01 else ("wrong", f"{ratio:.2f}x")


def main() -> None:
    """Print both tables."""
    models = {m["id"]: m for m in json.loads(DATA.read_text(encoding="utf-8"))["models"]}
    truths = {name: truth for name, model in models.items() if (truth := reference(model)) is not None}
    counts = {tool: {"right": 0, "wrong": 0, "refused": 0} for tool in TOOLS}
    rows = {}
    for name, truth in truths.items():
        cells = {tool: answer(tool, nested(models[name]["published"]), truth) for tool in TOOLS}
        rows[name] = cells
        for tool, (state, _) in cells.items():
            counts[tool][state] += 1
    print(f"| of {len(truths)} models | right | wrong | refused |\n|---|---|---|---|")
    for tool, found in counts.items():
        print(f"| {tool} | {found['right']} | {found['wrong']} | {found['refused']} |")
    print(f"\n| model | bytes at {CTX:,} tokens | {' | '.join(TOOLS)} |\n|---|---|{'---|' * len(TOOLS)}")
    for name in SHOWN:
        cells = " | ".join(cell for _, cell in rows[name].values())
        print(f"| {name} | {truths[name]:,.0f} | {cells} |")


if __name__ == "__main__":
    main()
