"""Shapes of published models that are too large for a test: their own configs, two layers, random weights.

``transformers`` answers at every position, past windows of thousands of keys and LongRoPE's first range. The config is
written as it was published, old spellings included, so that reading it is part of what is compared.
"""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import pytest
import torch

import kvist
from kvist.spec.from_config import model_spec
from kvist.spec.model import Attention, LongRope
from kvist.verify.compare import LOGITS, assert_bits_equal, assert_close, largest_row_error
from probing import all_logits
from published import MODELS, VOCAB, Published

STEP = 512
MARKED = [pytest.param(m, marks=[pytest.mark.full] if m.large else [], id=m.id) for m in MODELS.values()]


@pytest.mark.parametrize("one", MARKED)
def test_logits_are_those_of_transformers(one: Published, tmp_path: Path) -> None:
    ids = torch.randint(0, VOCAB, (one.length,), generator=torch.Generator().manual_seed(5)).tolist()
    model = one.model()
    folder = one.save(model, tmp_path / "model")
    try:
        with torch.inference_mode():
            right = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        del model
        gc.collect()
        llm = kvist.load(folder, dtype="float32", ctx_size=one.length, max_num_seqs=64)
        found = all_logits(llm, ids, STEP)
        assert right.std() > 0.1
        assert_close(found, right, LOGITS, one.id, largest_row_error)
        assert_bits_equal(all_logits(llm, ids[:200], 37), found[:200], "in pieces")
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("one", MODELS.values(), ids=lambda one: one.id)
def test_the_whole_config_is_read_as_transformers_reads_it(one: Published) -> None:
    spec, right = model_spec(one.config), one.whole_class()
    assert spec.num_layers == right.num_hidden_layers and spec.vocab_size == right.vocab_size
    assert spec.hidden_size == right.hidden_size
    assert spec.tied_embeddings == right.tie_word_embeddings
    kinds = getattr(right, "layer_types", None)
    window = getattr(right, "sliding_window", None)
    for index, layer in enumerate(spec.layers):
        a = layer.attention
        assert isinstance(a, Attention)
        assert a.num_heads == right.num_attention_heads
        assert a.head_dim == (getattr(right, "head_dim", None) or right.hidden_size // right.num_attention_heads)
        sliding = kinds[index] == "sliding_attention" if kinds else window is not None
        assert a.window == (window if sliding else None), index


def test_the_lengths_cross_what_they_are_there_for() -> None:
    """Windows and ranges that a comparison is said to reach past, it does."""
    for name, past in (
        ("mistralai/Mistral-7B-v0.1", 4096),
        ("google/gemma-2-2b", 4096),
        ("bigcode/starcoder2-7b", 4096),
        ("microsoft/Phi-3-mini-4k-instruct", 2047),
        ("google/gemma-3-1b-it", 512),
    ):
        spec = model_spec(MODELS[name].cut())
        assert past in [layer.attention.window for layer in spec.layers if isinstance(layer.attention, Attention)]
        assert MODELS[name].length > past + STEP // 8
    rope = model_spec(MODELS["microsoft/Phi-3.5-mini-instruct"].cut()).layers[0].attention.rope
    assert rope is not None and isinstance(rope.scaling, LongRope)
    assert rope.scaling.original_max_position == 4096 < MODELS["microsoft/Phi-3.5-mini-instruct"].length
