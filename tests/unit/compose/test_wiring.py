"""compose/wiring: a folder and settings become an engine on real kernels; small random models of both families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import letters
from kvist import Sampling, load
from kvist.base.errors import BadSampling, OutOfMemory, UsageError, WeightsError
from kvist.cache.check import check
from kvist.cache.sizing import blocks_for, context_bytes, pool_bytes
from kvist.compose import LLM
from kvist.spec.from_config import model_spec
from kvist.spec.names import expected_tensors

COMMON: dict[str, Any] = {
    "vocab_size": letters.SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": letters.END - 1,  # the tokenizer names another one
    "bos_token_id": None,
}
LLAMA = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
GEMMA = {
    **COMMON,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}
PROMPTS = ["Hello", "a", "A longer text, so that a window of twenty four tokens slides.", "no", "One more thing. " * 5]


def save(folder: Path, config: dict[str, Any]) -> Path:
    """A model folder with random weights, as a checkpoint has it."""
    letters.save(folder)
    (folder / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(5)
    tensors = {}
    for name, tensor in expected_tensors(model_spec(folder)).items():
        if not tensor.optional:
            scale = 3 / tensor.shape[-1] ** 0.5 if len(tensor.shape) > 1 else 0.3
            if name == "embed":
                scale /= 5  # tied: a large one would only ever repeat the last token
            tensors[tensor.name] = torch.randn(tensor.shape, generator=draw) * scale
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("gemma"), GEMMA)


def ids(llm: LLM, prompts: list[str], count: int = 24) -> list[tuple[int, ...]]:
    # Drawn, not greedy: a difference in the last bits of a logit shows sooner or later.
    sampling = Sampling(temperature=0.5, seed=9, max_tokens=count, ignore_eos=True)
    found = [done.ids for done in llm.generate(prompts, sampling)]
    check(llm.engine.groups, llm.engine.pools, llm.engine.tables)
    llm.engine.forget()
    assert [pool.num_used for pool in llm.engine.pools] == [0] * len(llm.engine.pools)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_batch_alone_and_without_a_cache_agree(family: str, dtype: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(family)
    llm = load(folder, dtype=dtype, block_size=16, max_num_seqs=4)
    together = ids(llm, PROMPTS)
    assert len(set(together)) == len(PROMPTS)
    assert min(len(set(found)) for found in together) > 8
    assert together == [ids(llm, [prompt])[0] for prompt in PROMPTS]
    bare = load(folder, dtype=dtype, max_num_seqs=3, cache=False)
    assert bare.setup is not None and not bare.setup.cache
    assert together == ids(bare, PROMPTS)
    work = [engine.metrics for engine in (bare.engine, llm.engine)]
    assert [m.projections == m.projections_without_cache for m in work] == [True, False]
    assert together == ids(load(folder, dtype=dtype, block_size=128, threads=1), PROMPTS)


def test_what_was_decided_is_told_and_nothing_printed(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[tuple[int, int]] = []
    llm = load(str(llama), progress=lambda done, total: heard.append((done, total)))
    setup, engine = llm.setup, llm.engine
    assert setup is not None
    assert (setup.dtype, setup.kv_cache_dtype) == ("float32", "float32")  # the checkpoint's own
    assert (setup.ctx_size, engine.scheduler.longest, setup.max_num_seqs) == (640, 640, 16)
    assert setup.cache_bytes == pool_bytes(engine.groups, [pool.num_blocks for pool in engine.pools])
    assert setup.cache_bytes == context_bytes(engine.groups, 640, 512)
    assert setup.bytes_per_token == 2 * 2 * (16 + 16) * 4
    assert engine.settings.eos_token_ids == {letters.END - 1, letters.END}
    assert heard == sorted(heard)
    assert 0 < heard[-1][0] <= heard[-1][1] == (llama / "model.safetensors").stat().st_size
    assert capfd.readouterr() == ("", "")


def test_types(llama: Path) -> None:
    for dtype, kv, expected in (
        ("bfloat16", "auto", ("bfloat16", "bfloat16")),
        ("bf16", "float32", ("bfloat16", "float32")),
        ("float32", "float16", ("float32", "float16")),
    ):
        llm = load(llama, dtype=dtype, kv_cache_dtype=kv)
        assert llm.setup is not None
        assert (llm.setup.dtype, llm.setup.kv_cache_dtype) == expected
        assert len(ids(llm, ["Hello"])[0]) == 24
    with pytest.raises(UsageError, match="float12"):
        load(llama, dtype="float12")
    with pytest.raises(UsageError, match="int8"):
        load(llama, kv_cache_dtype="int8")


def test_memory_is_a_limit_and_decides_how_many_share(gemma: Path) -> None:
    llm = load(gemma, max_num_seqs=4, block_size=16)
    one = [pool.num_blocks for pool in llm.engine.pools]
    # The full layer has one context; windows of four requests need no more than the tokens that there are.
    assert one == [40, 40]
    groups = llm.engine.groups
    budget = 2 * pool_bytes(groups, one)
    more = load(gemma, max_num_seqs=4, block_size=16, memory=budget)
    assert more.setup is not None
    assert budget // 2 < more.setup.cache_bytes <= budget
    plenty = load(gemma, max_num_seqs=4, block_size=16, memory=1 << 40)
    assert tuple(pool.num_blocks for pool in plenty.engine.pools) == blocks_for(groups, 640, 512, 4)
    with pytest.raises(OutOfMemory, match=r"needs \d+ bytes .* 50000 .*largest context that fits is \d+"):
        load(gemma, max_num_seqs=4, block_size=16, memory=50_000)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"ctx_size": 641}, UsageError, "ctx_size is 641, but this model was made for 1 to 640 positions"),
        ({"ctx_size": 0}, UsageError, "ctx_size is 0"),
        ({"max_num_seqs": 0}, UsageError, "max_num_seqs is 0"),
        ({"block_size": 24}, UsageError, "block size 24"),
        ({"block_size": 0}, UsageError, "block size 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    llama: Path, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        load(llama, **settings)


def test_a_missing_tensor_is_named_before_anything_is_allocated(llama: Path, tmp_path: Path) -> None:
    folder = save(tmp_path, {**LLAMA, "num_hidden_layers": 1})
    (folder / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(WeightsError, match=r"layers\.1\."):
        load(folder)


def test_a_small_context_still_serves_many(llama: Path) -> None:
    llm = load(llama, ctx_size=8, max_num_seqs=16)
    assert [len(found) for found in ids(llm, ["abc"] * 5)] == [6] * 5  # 8 stored, the last one only sampled


@pytest.mark.parametrize("prompts", [None, 5, b"abc", [None], [b"abc"], [["a"]], [5]])
def test_what_is_no_prompt_is_refused_by_name(llama: Path, prompts: object) -> None:
    with pytest.raises(UsageError, match=r"give a text|a prompt is a text or a list of token ids"):
        load(llama).generate(prompts)  # type: ignore[call-overload]


@pytest.mark.parametrize("settings", [{"stop": None}, {"stop": 5}, {"stop": [1]}])
def test_what_is_no_stop_is_refused_by_name(llama: Path, settings: dict[str, object]) -> None:
    with pytest.raises(BadSampling, match="give a tuple of strings"):
        load(llama).generate("a", **settings)


@pytest.mark.parametrize("ctx_size", [1.5, "8", 0, -1])
def test_what_is_no_context_is_refused_by_name(llama: Path, ctx_size: object) -> None:
    with pytest.raises(UsageError, match="ctx_size is"):
        load(llama, ctx_size=ctx_size)  # type: ignore[arg-type]
