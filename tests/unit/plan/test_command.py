from __future__ import annotations

import pytest

from kvist.base.errors import UsageError
from kvist.plan.command import find_command, read_command
from kvist.plan.settings import PlanSettings


def read(text: str) -> tuple[PlanSettings, str | None, dict[str, str]]:
    command = read_command(text.split())
    return command.plan_settings(PlanSettings()), command.model, {mark.flag: mark.state for mark in command.marks}


def test_vllm() -> None:
    settings, model, marks = read(
        "vllm serve org/model --max-model-len 32k --max-num-seqs=8 -tp 2 --kv-cache-dtype fp8 --port 80 --enforce-eager"
        " --max-num-batched-tokens 2048 --gpu-memory-utilization 0.9 --disable-hybrid-kv-cache-manager --frobnicate 3"
    )
    assert model == "org/model" and settings.engine == "vllm"
    assert (settings.ctx_size, settings.max_num_seqs, settings.tensor_parallel) == (32768, 8, 2)
    assert (settings.kv_cache_dtype, settings.utilisation) == ("fp8", 0.9)
    assert settings.engine_flags == {"max_num_batched_tokens": 2048, "hybrid_manager": False}
    assert marks["--port"] == marks["--enforce-eager"] == "irrelevant"
    assert marks["--frobnicate"] == "not understood"
    assert marks["--max-num-seqs"] == "used"


def test_vllm_as_a_module_and_with_speculation() -> None:
    command = read_command(
        [
            *["/usr/bin/python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"],
            "--speculative-config",
            '{"method": "mtp", "num_speculative_tokens": 3}',
        ]
    )
    assert command.model == "m"
    assert command.engine_flags == {"speculative_tokens": 3, "draft_layers": 1}


def test_sglang() -> None:
    settings, model, _ = read(
        "python -m sglang.launch_server --model-path m --context-length 4096 --tp 4 --mem-fraction-static 0.8"
    )
    assert (model, settings.engine, settings.ctx_size) == ("m", "sglang", 4096)
    assert (settings.tensor_parallel, settings.utilisation) == (4, 0.8)


def test_llama_server_shares_its_context_between_slots() -> None:
    settings, model, marks = read("llama-server -m x.gguf -c 8192 -np 4 -ctk q8_0 -ctv q4_0 -fa off -ub 128 -ngl 99")
    assert (model, settings.engine, settings.ctx_size, settings.max_num_seqs) == ("x.gguf", "llama.cpp", 2048, 4)
    assert (settings.cache_type_k, settings.cache_type_v) == ("q8_0", "q4_0")
    assert settings.engine_flags == {"flash_attention": False, "ubatch": 128}
    assert marks["-ngl"] == "irrelevant"


def test_ollama_variables() -> None:
    settings, model, marks = read(
        "OLLAMA_CONTEXT_LENGTH=4096 OLLAMA_NUM_PARALLEL=2 OLLAMA_KV_CACHE_TYPE=q8_0 OLLAMA_HOST=x ollama run smollm2"
    )
    assert (model, settings.ctx_size, settings.max_num_seqs, settings.kv_cache_dtype) == ("smollm2", 4096, 2, "q8_0")
    assert marks["OLLAMA_HOST"] == "not understood"


def test_options_before_the_command_win() -> None:
    command = read_command(["vllm", "serve", "m", "--max-model-len", "4096"])
    assert command.plan_settings(PlanSettings(ctx_size=77)).ctx_size == 77


def test_where_a_command_begins() -> None:
    assert find_command(["m", "vllm", "serve", "x"]) == 1
    assert find_command(["A_B=1", "ollama"]) == 0
    assert find_command(["model"]) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm bench x", "unknown command 'vllm bench x'"),
        ("python -m other.thing", "unknown command"),
        ("vllm serve m --max-model-len many", "--max-model-len is 'many'"),
        ("vllm serve m --max-model-len", "--max-model-len needs a value"),
        ("vllm serve m --gpu-memory-utilization lots", "use a number such as 0.9"),
        ("vllm serve m --speculative-config 3", "must be a JSON object"),
        ("vllm serve m --speculative-config {}", "num_speculative_tokens"),
    ],
)
def test_bad_commands(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_command(text.split())
