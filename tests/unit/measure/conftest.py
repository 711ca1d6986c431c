"""A small random model in a folder, as a user has one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig

import hf_models
import letters


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("bench") / "tiny"
    hf_models.model_of(config).save_pretrained(path)
    return letters.save(path)


@pytest.fixture(scope="session")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most layers see 40 tokens, and the context is longer than a step and a window together."""
    torch.manual_seed(11)
    config = Gemma3TextConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=40,
        max_position_embeddings=1024,
    )
    path = tmp_path_factory.mktemp("bench") / "windows"
    hf_models.model_of(config).save_pretrained(path)
    return letters.save(path)
