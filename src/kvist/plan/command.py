"""Commands of other engines, read flag by flag: what each one changes in the plan, and which ones change nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvist.base.errors import UsageError
from kvist.plan.settings import PlanSettings
from kvist.plan.sizes import parse_count, parse_size

_VARIABLE = re.compile(r"^[A-Z][A-Z0-9_]*=")
USED, IRRELEVANT, UNKNOWN = "used", "irrelevant", "not understood"


@dataclass(frozen=True, slots=True)
class Mark:
    """A flag of the command, its value, and what became of it."""

    flag: str
    value: str | None
    state: str
    note: str = ""


@dataclass(slots=True)
class Command:
    """What a command says: the model, the settings of a plan, and every flag with its mark."""

    engine: str
    model: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    engine_flags: dict[str, Any] = field(default_factory=dict)
    weights_dtype: str | None = None
    total_ctx: bool = False
    marks: list[Mark] = field(default_factory=list)

    def plan_settings(self, base: PlanSettings) -> PlanSettings:
        """``base`` (the options before ``--``) with what the command says; an option given before ``--`` wins."""
        default = PlanSettings()
        mine = {name: value for name, value in self.settings.items() if getattr(base, name) == getattr(default, name)}
        if self.total_ctx and isinstance(mine.get("ctx_size"), int):
            slots = mine.get("max_num_seqs", base.max_num_seqs)
            mine["ctx_size"] = max(1, mine["ctx_size"] // slots) if mine["ctx_size"] else 0
        if self.weights_dtype is not None and base.weights_dtype is None:
            mine["weights_dtype"] = self.weights_dtype
        return replace(base, engine=self.engine, engine_flags={**self.engine_flags, **base.engine_flags}, **mine)


# flag -> (what it sets, how its value is read). ``engine:`` names go to the engine's own settings.
_Rule = tuple[str, str]
_VLLM: dict[str, _Rule] = {
    "--model": ("model", "text"),
    "--max-model-len": ("ctx_size", "ctx"),
    "--max-num-seqs": ("max_num_seqs", "count"),
    "--kv-cache-dtype": ("kv_cache_dtype", "text"),
    "--tensor-parallel-size": ("tensor_parallel", "count"),
    "-tp": ("tensor_parallel", "count"),
    "--block-size": ("block_size", "count"),
    "--gpu-memory-utilization": ("utilisation", "share"),
    "--kv-cache-memory-bytes": ("kv_cache_memory", "size"),
    "--kv-cache-memory": ("kv_cache_memory", "size"),
    "--max-num-batched-tokens": ("engine:max_num_batched_tokens", "count"),
    "--decode-context-parallel-size": ("engine:decode_context_parallel", "count"),
    "-dcp": ("engine:decode_context_parallel", "count"),
    "--disable-hybrid-kv-cache-manager": ("engine:hybrid_manager", "false"),
    "--enable-prefix-caching": ("engine:checkpoints", "true"),
    "--no-enable-prefix-caching": ("engine:checkpoints", "false"),
    "--speculative-config": ("speculative", "json"),
    "--quantization": ("weights", "text"),
    "-q": ("weights", "text"),
    "--dtype": ("model_dtype", "text"),
}
_SGLANG: dict[str, _Rule] = {
    "--model-path": ("model", "text"),
    "--model": ("model", "text"),
    "--context-length": ("ctx_size", "ctx"),
    "--max-running-requests": ("max_num_seqs", "count"),
    "--kv-cache-dtype": ("kv_cache_dtype", "text"),
    "--tp-size": ("tensor_parallel", "count"),
    "--tensor-parallel-size": ("tensor_parallel", "count"),
    "--tp": ("tensor_parallel", "count"),
    "--page-size": ("block_size", "count"),
    "--mem-fraction-static": ("utilisation", "share"),
    "--swa-full-tokens-ratio": ("engine:swa_full_tokens_ratio", "share"),
    "--quantization": ("weights", "text"),
    "--dtype": ("model_dtype", "text"),
}
_LLAMA: dict[str, _Rule] = {
    "-m": ("model", "text"),
    "--model": ("model", "text"),
    "-hf": ("model", "text"),
    "--hf-repo": ("model", "text"),
    "-c": ("ctx_size", "ctx"),
    "--ctx-size": ("ctx_size", "ctx"),
    "-np": ("max_num_seqs", "count"),
    "--parallel": ("max_num_seqs", "count"),
    "-ctk": ("cache_type_k", "text"),
    "--cache-type-k": ("cache_type_k", "text"),
    "-ctv": ("cache_type_v", "text"),
    "--cache-type-v": ("cache_type_v", "text"),
    "-ub": ("engine:ubatch", "count"),
    "--ubatch-size": ("engine:ubatch", "count"),
    "-fa": ("engine:flash_attention", "onoff"),
    "--flash-attn": ("engine:flash_attention", "onoff"),
    "--swa-full": ("engine:swa_full", "true"),
    "-kvu": ("engine:unified", "true"),
    "--kv-unified": ("engine:unified", "true"),
    "--no-kv-unified": ("engine:unified", "false"),
}
_OLLAMA: dict[str, _Rule] = {
    "OLLAMA_CONTEXT_LENGTH": ("ctx_size", "count"),
    "OLLAMA_NUM_PARALLEL": ("max_num_seqs", "count"),
    "OLLAMA_KV_CACHE_TYPE": ("kv_cache_dtype", "text"),
    "OLLAMA_FLASH_ATTENTION": ("engine:flash_attention", "onoff"),
}
# Flags that change no byte of the cache; those of the second list take no value.
_NO_EFFECT_LIST = """
--host --port --api-key --served-model-name --tokenizer --revision --download-dir --seed --log-level --chat-template
--tool-call-parser --reasoning-parser --uvicorn-log-level --scheduling-policy --schedule-policy --generation-config
--config-format --load-format --ssl-keyfile --ssl-certfile --root-path -ngl --n-gpu-layers --gpu-layers -t --threads
-b --batch-size --alias -a --temp --top-k --top-p --min-p --repeat-penalty -n --predict --n-predict -p --prompt
--attention-backend --chunked-prefill-size --max-prefill-tokens --pipeline-parallel-size -pp --data-parallel-size -dp
--dp-size --limit-mm-per-prompt --compilation-config -O --override-generation-config --tokenizer-path
"""
_NO_EFFECT_PLAIN_LIST = """
--trust-remote-code --enable-auto-tool-choice --disable-log-requests --disable-log-stats --enforce-eager
--enable-chunked-prefill --no-enable-chunked-prefill --async-scheduling --enable-metrics --disable-radix-cache
--enable-expert-parallel --jinja --metrics --no-webui --mlock --no-mmap --verbose -v --cont-batching -cb
"""
_NO_EFFECT = frozenset(_NO_EFFECT_LIST.split())
_NO_EFFECT_PLAIN = frozenset(_NO_EFFECT_PLAIN_LIST.split())
_WEIGHTS = {"fp8": "fp8", "awq": "int4", "gptq": "int4", "awq_marlin": "int4", "gptq_marlin": "int4", "int8": "int8"}


def find_command(words: Sequence[str]) -> int | None:
    """Where in ``words`` another engine's command begins, or None."""
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if _VARIABLE.match(word) or name in ("vllm", "sglang", "llama-server", "llama-cli", "ollama"):
            return index
        if name.startswith("python") and "-m" in words[index + 1 : index + 3]:
            return index
    return None


def read_command(words: Sequence[str]) -> Command:
    """The settings in a command line. UsageError when its engine is not known or a value cannot be read."""
    words = list(words)
    variables = []
    while words and _VARIABLE.match(words[0]):
        variables.append(words.pop(0))
    command, rest, rules = _launcher(words, bool(variables))
    for variable in variables:
        name, _, value = variable.partition("=")
        rule = _OLLAMA.get(name) if command.engine == "llama.cpp" else None
        if rule is None:
            command.marks.append(Mark(name, value, UNKNOWN if name.startswith("OLLAMA_") else IRRELEVANT))
        else:
            _apply(command, name, value, rule)
    _flags(command, rest, rules)
    return command


def _launcher(words: list[str], has_variables: bool) -> tuple[Command, list[str], dict[str, _Rule]]:
    if not words:
        if has_variables:
            return Command("llama.cpp"), [], {}
        raise UsageError("no command after --: paste one that begins with vllm, sglang, llama-server or ollama")
    name = words[0].rpartition("/")[2]
    if name.startswith("python") and "-m" in words[1:3]:
        module = words[words.index("-m") + 1] if words.index("-m") + 1 < len(words) else ""
        rest = words[words.index("-m") + 2 :]
        if module.startswith("vllm."):
            return Command("vllm"), rest, _VLLM
        if module.startswith("sglang."):
            return Command("sglang"), rest, _SGLANG
    if name == "vllm" and words[1:2] == ["serve"]:
        rest = words[2:]
        model = rest[0] if rest and not rest[0].startswith("-") else None
        return Command("vllm", model), rest[1:] if model else rest, _VLLM
    if name == "sglang" and words[1:2] == ["serve"]:
        return Command("sglang"), words[2:], _SGLANG
    if name in ("llama-server", "llama-cli"):
        return Command("llama.cpp", total_ctx=True), words[1:], _LLAMA
    if name == "ollama":
        model = words[2] if len(words) > 2 and words[1] == "run" else None
        command = Command("llama.cpp", model)
        command.marks.append(Mark("ollama", model, USED, "runs llama.cpp's caches"))
        return command, words[3:] if model else words[2:], {}
    raise UsageError(
        f"unknown command {' '.join(words[:3])!r}: vllm serve, python -m vllm..., sglang serve, python -m sglang...,"
        " llama-server, llama-cli and ollama are known"
    )


def _flags(command: Command, words: list[str], rules: dict[str, _Rule]) -> None:
    index = 0
    while index < len(words):
        flag, equals, attached = words[index].partition("=")
        index += 1
        value = attached if equals else None
        rule = rules.get(flag) or rules.get(flag.replace("_", "-"))
        plain = rule is not None and rule[1] in ("true", "false")
        if value is None and not plain and flag not in _NO_EFFECT_PLAIN and index < len(words):
            following = words[index]
            if not following.startswith("-") or re.match(r"^-\d", following):
                value = following
                index += 1
        if rule is not None:
            _apply(command, flag, value, rule)
        elif flag in _NO_EFFECT or flag in _NO_EFFECT_PLAIN:
            command.marks.append(Mark(flag, value, IRRELEVANT))
        else:
            command.marks.append(Mark(flag, value, UNKNOWN))


def _apply(command: Command, flag: str, value: str | None, rule: _Rule) -> None:
    target, form = rule
    read = _read(flag, value, form)
    note = ""
    if target == "model":
        command.model = str(read)
    elif target == "model_dtype":
        command.marks.append(Mark(flag, value, IRRELEVANT, "the cache type follows --kv-cache-dtype"))
        return
    elif target == "weights":
        command.weights_dtype = _WEIGHTS.get(str(read))
        note = "weights" if command.weights_dtype else "weights of a type that has no fixed width: not counted again"
    elif target == "speculative":
        assert isinstance(read, dict)
        tokens = read.get("num_speculative_tokens")
        if not isinstance(tokens, int) or not 0 < tokens <= 64:
            raise UsageError(f"{flag} must say num_speculative_tokens (1 to 64), it is {value!r}")
        command.engine_flags.update(speculative_tokens=tokens)
        if str(read.get("method", "")).endswith("mtp"):
            command.engine_flags.update(draft_layers=1)
    elif target.startswith("engine:"):
        command.engine_flags[target.removeprefix("engine:")] = read
    else:
        command.settings[target] = read
    command.marks.append(Mark(flag, value, USED, note))


def _read(flag: str, value: str | None, form: str) -> Any:
    if form in ("true", "false"):
        return form == "true"
    if form == "onoff":
        return value is None or value.lower() in ("1", "on", "true", "auto", "yes")
    if value is None:
        raise UsageError(f"{flag} needs a value")
    if form == "count":
        return parse_count(value, flag)
    if form == "ctx":
        return 0 if value in ("-1", "0", "auto", "max") else parse_count(value, flag)
    if form == "size":
        return parse_size(value, flag)
    if form == "share":
        try:
            return float(value)
        except ValueError:
            raise UsageError(f"{flag} is {value!r}: use a number such as 0.9") from None
    if form == "json":
        try:
            read = json.loads(value)
        except ValueError:
            read = None
        if not isinstance(read, dict):
            raise UsageError(f"{flag} is {value!r}: it must be a JSON object")
        return read
    return value
