"""Loaded models with latents and experts: what they take, what they answer beside others, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import Tensor

import kvist
import letters
from deepseek_configs import V3
from family_configs import CONFIGS, DEEPSEEK, random_model
from kvist.base.dtypes import FLOAT32
from kvist.base.errors import KernelError, KvistError, SpecError, UnknownArchitecture, UsageError
from kvist.compose import LLM
from kvist.kernels.reference import ReferenceBackend
from kvist.model.checkpoint import SafetensorsCheckpoint, loaded_bytes
from kvist.model.latent import expand_from, key_bytes
from kvist.model.weights import load_weights
from kvist.plan.plan import plan
from kvist.spec.from_config import model_spec
from kvist.spec.from_gguf import gguf_model
from kvist.spec.model import LatentAttention
from kvist.spec.source import resolve
from kvist.verify.compare import LOGITS, assert_bits_equal, assert_close, bits_equal, largest_row_error
from probing import Probe, all_logits, feed

KINDS = ("deepseek_v2", "deepseek_v2 groups", "deepseek_v3", "minicpm3 plain", "mixtral", "qwen3_moe", "olmoe")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("latent-models")


def folder(root: Path, kind: str) -> Path:
    path = root / kind
    if not path.exists():
        random_model(CONFIGS[kind]()).save_pretrained(path)
        letters.save(path)
    return path


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_known_before_anything_is_read(root: Path, kind: str) -> None:
    spec = model_spec(folder(root, kind))
    checkpoint = SafetensorsCheckpoint(spec, resolve(str(folder(root, kind))).shards())
    weights = load_weights(spec, checkpoint, ReferenceBackend(), FLOAT32)
    assert weights.nbytes == loaded_bytes(spec, 4)
    assert loaded_bytes(spec, 2) > loaded_bytes(spec, 4) // 2  # routers and norms stay float32


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_the_cache_holds_what_was_planned(root: Path, kind: str) -> None:
    made = plan(folder(root, kind), ctx_size=200, block_size=16, kv_cache_dtype="bfloat16")
    settings = {"ctx_size": 200, "block_size": 16, "kv_cache_dtype": "bfloat16", "max_num_seqs": 1}
    with kvist.load(folder(root, kind), dtype="bfloat16", **settings) as llm:
        assert llm.setup is not None
        assert llm.setup.cache_bytes == made.allocated_bytes == 3 * 13 * 16 * (16 + 8) * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_that_choose_other_experts_change_nothing(root: Path, kind: str, dtype: str) -> None:
    """Batches change from step to step, and with them the rows that every expert gets: no bit of the others moves."""
    settings = {"ctx_size": 256, "block_size": 16, "max_num_seqs": 4}
    llm = kvist.load(folder(root, kind), dtype=dtype, kv_cache_dtype=dtype, **settings)
    text = tokens(90, 1)
    right = all_logits(llm, text, 90)
    assert_bits_equal(_beside(llm, text), right, f"{kind} in {dtype}")


def _beside(llm: LLM, text: list[int]) -> Tensor:
    mine, others = Probe(llm, text), []
    draw = torch.Generator().manual_seed(4)
    found: list[Tensor] = []
    while mine.left:
        others = [other for other in others if other.left]
        while len(others) < 2:
            others.append(Probe(llm, tokens(60, len(found) + 7 * len(others))))
        size = min(int(torch.randint(1, 12, (1,), generator=draw)), mine.left)
        parts = [(other, min(3 + size, other.left)) for other in others]
        parts.insert(size % 3, (mine, size))
        found += [logits.clone() for probe, _, logits in feed(parts) if probe is mine]
        for other in others:
            if not other.left:
                other.table.release()
    for probe in (mine, *others):
        probe.table.release()
    return torch.cat(found)


def test_a_window_over_latents_is_refused(root: Path) -> None:
    with pytest.raises(SpecError, match="only keys and values can be bounded"):
        kvist.load(folder(root, "deepseek_v2"), kv_window=32)


def test_float16_latents_run_or_are_refused_by_name(root: Path) -> None:
    try:
        llm = kvist.load(folder(root, "minicpm3 plain"), kv_cache_dtype="float16", ctx_size=64)
    except KvistError as error:
        assert "float16" in str(error)
    else:
        assert llm.generate([[1, 2, 3]], max_tokens=2)[0].generated_tokens > 0


@pytest.mark.parametrize("architecture", ["deepseek2", "minicpm3", "qwen3moe", "olmoe"])
def test_gguf_files_with_latents_or_experts_are_refused_by_name(tmp_path: Path, architecture: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnknownArchitecture, match=f"not runnable yet: architecture '{architecture}'"):
        gguf_model(tmp_path / "model.gguf")


WIDE = {**DEEPSEEK, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 2}


def test_expanding_long_steps(root: Path) -> None:
    """The same function by value; the last bits depend on the cut, which is what the note says."""
    path = root / "wide"
    model = random_model(hf.DeepseekV2Config(**WIDE, n_shared_experts=2))
    model.save_pretrained(path)
    letters.save(path)
    settings = {"ctx_size": 320, "block_size": 16, "max_num_seqs": 2}
    absorbed, expanded = kvist.load(path, **settings), kvist.load(path, mla_prefill="expand", **settings)
    assert expanded.setup is not None and absorbed.setup is not None
    assert "expanded in steps of 22 tokens a request or more: outside law 1" in expanded.setup.spec.notes[-1]
    more = expanded.setup.weight_bytes - absorbed.setup.weight_bytes
    # Panels of 32 rows hold the 16 of each head.
    assert more == 2 * key_bytes(expanded.setup.spec, FLOAT32) == 2 * 3 * 4 * 16 * 64 * 4
    text = tokens(300, 5)
    with torch.inference_mode():
        right = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    plain, long = all_logits(absorbed, text, 300), all_logits(expanded, text, 300)
    assert_close(long, right, LOGITS, "expanded", largest_row_error)
    assert not bits_equal(long, plain)  # it did run
    assert bits_equal(all_logits(expanded, text, 21), plain)  # short steps are absorbed
    pieces = all_logits(expanded, text, 70)  # the last one has 20 tokens, and is absorbed
    assert not bits_equal(pieces, long)
    assert_close(pieces, right, LOGITS, "pieces of 70", largest_row_error)


def test_expanding_is_refused_where_there_is_nothing_to_expand(root: Path) -> None:
    with pytest.raises(UsageError, match="mixtral model keeps keys and values, no latents"):
        kvist.load(folder(root, "mixtral"), mla_prefill="expand")
    with pytest.raises(UsageError, match="mla_prefill is 'both': use absorb or expand"):
        kvist.load(folder(root, "mixtral"), mla_prefill="both")
    with pytest.raises(KernelError, match="10 channels are not whole vectors of 16"):
        kvist.load(folder(root, "deepseek_v3"), mla_prefill="expand")


def test_expanding_pays_from_171_queries_on_for_deepseek_v3() -> None:
    spec = model_spec(V3)
    attention = spec.layers[0].attention
    assert isinstance(attention, LatentAttention)
    assert expand_from(attention) == 171
    assert expand_from(replace(attention, kv_lora_rank=16, qk_nope_head_dim=16, v_head_dim=16)) == 2**31
