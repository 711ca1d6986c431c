"""Small random models that ``transformers`` made and saved: kvist reads the folder and must answer the same.

On the reference kernels paths agree by value, on native ones in every bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

import hf_models
import kvist
import letters
from kvist.compose import LLM
from kvist.kernels.dispatch import VARIABLE
from kvist.kernels.native import variants
from kvist.verify.compare import LOGITS, PATHS, assert_bits_equal, assert_close, largest_row_error
from probing import Probe, all_logits, feed

LENGTH = 300  # more than two splits of 128 keys, and many windows
KERNELS = [*variants(), "reference"]
# Every variant meets every law in tests/laws: here the others wait for `make test-full`.
USUAL = [*KERNELS[:1], *(pytest.param(name, marks=pytest.mark.full) for name in KERNELS[1:-1]), *KERNELS[1:][-1:]]
CHUNKS = (1, 3, 64)

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**COMMON, "num_hidden_layers": 3, "rope_theta": 10_000.0, **changes})


def gemma(**changes: Any) -> Gemma3TextConfig:
    settings = {"num_hidden_layers": 7, "sliding_window": 40, "query_pre_attn_scalar": 24, "rope_theta": 1e6}
    return Gemma3TextConfig(**{**COMMON, **settings, "rope_local_base_freq": 1e4, **changes})


def gemma_rope(**full: Any) -> dict[str, Any]:
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    return {"sliding_attention": sliding, "full_attention": {"rope_theta": 1e6, **full}}


def multimodal() -> Gemma3Config:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Gemma3Config(
        text_config=gemma().to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=96,
    )


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: llama(tie_word_embeddings=True),
    "llama untied": lambda: llama(tie_word_embeddings=False),
    "llama biases": lambda: llama(attention_bias=True, mlp_bias=True, num_key_value_heads=6),
    "llama one kv head, odd vocabulary": lambda: llama(num_key_value_heads=1, vocab_size=101, head_dim=24),
    "llama linear": lambda: llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
    "llama llama3": lambda: llama(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}),
    "gemma3": gemma,
    # Of the two soft caps only that of the logits: transformers reads attn_logit_softcapping, and does not apply it.
    "gemma3 soft cap": lambda: gemma(final_logit_softcapping=3.0),
    "gemma3 linear": lambda: gemma(rope_parameters=gemma_rope(rope_type="linear", factor=8.0)),
    "gemma3 other layers": lambda: gemma(
        num_hidden_layers=3, layer_types=["full_attention", "sliding_attention", "full_attention"], sliding_window=17
    ),
    "gemma3 multimodal": multimodal,
}


@torch.no_grad()
def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Every tensor random, with what ``transformers`` starts at zero or one (biases, norms) moved away from it."""
    torch.manual_seed(11)
    model = hf_models.model_of(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            start = 1.0 if "norm" in name and isinstance(config, LlamaConfig) else 0.0
            parameter.copy_(start + 0.3 * torch.randn_like(parameter))
        else:  # a small embedding: else every token would be followed by itself
            parameter.normal_(std=(0.5 if "embed" in name else 2) / parameter.shape[-1] ** 0.5)
    return model


class Folders:
    """Each kind's model, its folder, and it loaded by kvist on each kernel set; made when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models: dict[str, PreTrainedModel] = {}
        self.loaded: dict[tuple[str, str], LLM] = {}

    def model(self, kind: str) -> PreTrainedModel:
        if kind not in self.models:
            self.models[kind] = random_model(CONFIGS[kind]())
            self.save(kind, self.models[kind])
        return self.models[kind]

    def save(self, name: str, model: PreTrainedModel, **settings: Any) -> Path:
        model.save_pretrained(self.root / name, **settings)
        return letters.save(self.root / name)

    def llm(self, kind: str, kernels: str) -> LLM:
        if (kind, kernels) not in self.loaded:
            self.model(kind)
            llm = self.loaded[kind, kernels] = load(self.root / kind, kernels)
            assert llm.setup is not None and llm.setup.dtype == "float32"
            assert llm.setup.kernels == (kernels if kernels == "reference" else f"native-{kernels}")
        return self.loaded[kind, kernels]


def load(folder: Path, kernels: str, **settings: Any) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, kernels)
        return kvist.load(folder, **{"ctx_size": 512, "max_num_seqs": 8, "block_size": 16, **settings})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("tiny"))


def tokens(count: int = LENGTH, seed: int = 5) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def expected(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def assert_same_path(kernels: str, actual: Tensor, right: Tensor, what: str) -> None:
    if kernels == "reference":
        assert_close(actual, right, PATHS, what)
    else:
        assert_bits_equal(actual, right, what)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_transformers(folders: Folders, kind: str, kernels: str) -> None:
    right = expected(folders.model(kind), tokens())
    assert right.std() > 0.1
    actual = all_logits(folders.llm(kind, kernels), tokens(), LENGTH)
    assert_close(actual, right, LOGITS, kind, largest_row_error)


@pytest.mark.parametrize("kernels", USUAL)
@pytest.mark.parametrize("kind", ["llama biases", "llama llama3", "gemma3"])
def test_pieces_do_not_matter(folders: Folders, kind: str, kernels: str) -> None:
    llm = folders.llm(kind, kernels)
    text = tokens(140)  # past three windows and the first split
    whole = all_logits(llm, text, len(text))
    for chunk in CHUNKS:
        assert_same_path(kernels, all_logits(llm, text, chunk), whole, f"chunks of {chunk}")
    assert all(pool.num_used == 0 for pool in llm.engine.pools)


@pytest.mark.parametrize("kernels", USUAL)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_batch_of_unequal_lengths(folders: Folders, kind: str, kernels: str) -> None:
    """Requests of 1 to 150 tokens, in chunks that change from step to step; the longest outlives the others."""
    llm = folders.llm(kind, kernels)
    texts = [tokens(count, seed=count) for count in (1, 2, 17, 41, 90, 150)]
    probes = [Probe(llm, text) for text in texts]
    found: list[list[Tensor]] = [[] for _ in probes]
    draw = random.Random(4)
    largest = 0
    while running := [probe for probe in probes if probe.left]:
        parts = [(probe, min(draw.randint(1, 20), probe.left)) for probe in draw.sample(running, len(running))]
        largest = max(largest, len(parts))
        for probe, at, logits in feed(parts):
            rows = found[probes.index(probe)]
            assert sum(map(len, rows)) == at
            rows.append(logits.clone())
    assert largest == len(texts)
    for probe in probes:
        probe.table.release()
    for text, rows in zip(texts, found, strict=True):
        assert_same_path(kernels, torch.cat(rows), all_logits(llm, text, len(text)), f"{len(text)} tokens")


@pytest.mark.parametrize("kernels", USUAL)
@pytest.mark.parametrize("kind", ["llama untied", "gemma3"])
def test_the_engine_gives_the_same_greedy_tokens(folders: Folders, kind: str, kernels: str) -> None:
    """More requests than run at once, prompts longer than a window, against one forward of ``transformers`` each."""
    llm = folders.llm(kind, kernels)
    prompts = [tokens(count, seed=count) for count in (3, 1, 60, 130, 7, 45, 2, 33, 90, 5, 12)]
    done = llm.generate(prompts, max_tokens=12, ignore_eos=True)
    for prompt, one in zip(prompts, done, strict=True):
        logits = expected(folders.model(kind), [*prompt, *one.ids[:-1]])[-12:]
        assert tuple(logits.argmax(-1).tolist()) == one.ids
        llm.engine.forget()
        alone = llm.generate([prompt], max_tokens=12, ignore_eos=True)[0]
        behind = llm.generate([prompt], max_tokens=12, ignore_eos=True)[0]  # begins with the rows that alone left
        assert alone.ids == behind.ids == one.ids
        assert alone.cached_tokens == 0
        if kind != "gemma3":  # a window has given some of them back
            assert behind.cached_tokens == (len(prompt) - 1) // 16 * 16
    assert len({token for one in done for token in one.ids}) > 20


@pytest.mark.parametrize("kind", ["llama untied", "gemma3", "gemma3 multimodal"])
def test_a_folder_in_shards(folders: Folders, kind: str) -> None:
    folder = folders.save(f"{kind} in shards", folders.model(kind), max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    right = all_logits(folders.llm(kind, KERNELS[0]), tokens(50), 50)
    assert_bits_equal(all_logits(load(folder, KERNELS[0]), tokens(50), 50), right, "in shards")


@pytest.mark.parametrize("kernels", USUAL)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_checkpoint_read_as_float32(folders: Folders, stored: torch.dtype, kernels: str) -> None:
    """Rounded once, by who saved it: read as float32 it is the model that ``transformers`` reads as float32."""
    folder = folders.save(f"llama {stored} {kernels}", random_model(llama()).to(stored))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    llm = load(folder, kernels, dtype="float32", kv_cache_dtype="float32")
    assert_close(all_logits(llm, tokens(60), 60), expected(model, tokens(60)), LOGITS, "logits", largest_row_error)
    rounded = load(folder, kernels)
    assert rounded.setup is not None
    assert rounded.setup.dtype == ("float32" if kernels == "reference" else "bfloat16")
