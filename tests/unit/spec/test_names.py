from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from kvist.base.errors import WeightsError
from kvist.spec.from_config import model_spec
from kvist.spec.model import LatentAttention, LayerSpec, MixtureOfExperts, ModelSpec
from kvist.spec.names import expected_tensors, half_split_rows, match_names, row_order

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "head_dim": 16,
}


@pytest.mark.parametrize("bias", [False, True])
def test_llama_names_are_those_of_the_real_model(bias: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SMALL, attention_bias=bias, mlp_bias=bias)
    check(LlamaForCausalLM(config), config)


def test_gemma3_names_are_those_of_the_real_model() -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(**SMALL, sliding_window=8)
    check(Gemma3ForCausalLM(config), config)


def test_gemma3_inside_a_multimodal_model() -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = Gemma3Config(
        text_config={**SMALL, "sliding_window": 8}, vision_config={**vision, "image_size": 28, "patch_size": 14}
    )
    check(Gemma3ForConditionalGeneration(config), config)


def check(model: Any, config: Any) -> None:
    spec = model_spec(json.loads(config.to_json_string()))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    match = match_names(spec, shapes, "hf", shapes)
    match.require("model")
    needed = {name for name, tensor in expected_tensors(spec).items() if not tensor.optional}
    assert set(match.found) == needed


def spec() -> ModelSpec:
    return model_spec({**SMALL, "model_type": "llama", "max_position_embeddings": 64, "rms_norm_eps": 1e-5})


def test_every_difference_is_listed() -> None:
    names = {tensor.name: tensor.shape for tensor in expected_tensors(spec()).values()}
    names["model.layers.9.extra.weight"] = (1,)
    names["model.layers.0.self_attn.rotary_emb.inv_freq"] = (8,)
    del names["model.layers.1.mlp.up_proj.weight"]
    names["model.norm.weight"] = (63,)
    match = match_names(spec(), names, "hf", names)
    assert match.extra == ("model.layers.9.extra.weight",)
    assert match.missing == ("layers.1.up (model.layers.1.mlp.up_proj.weight)",)
    assert match.misshaped == ("model.norm.weight is [63], expected [64]",)
    with pytest.raises(WeightsError, match=r"missing \(1\).*extra \(1\).*of another shape \(1\)"):
        match.require("file")


def test_rows_are_put_back_as_halves() -> None:
    heads, width = 3, 8
    halves = np.arange(heads * width)
    interleaved = halves.reshape(heads, 2, width // 2).swapaxes(1, 2).reshape(-1)
    assert (interleaved[half_split_rows(heads, width)] == halves).all()


def test_latents_and_experts_have_their_own_tensors() -> None:
    plain = spec()
    latent = LatentAttention(4, 12, 16, 8, 4, 6, 0.25, interleaved=True)
    experts = MixtureOfExperts(3, 2, 10, "silu", shared_size=20, correction_bias=True)
    layer = LayerSpec(latent, experts, plain.norm)
    tensors = expected_tensors(dataclasses.replace(plain, layers=(layer,), mtp_layers=1))
    names = {tensor.name.removeprefix("model.layers.0."): tensor.shape for tensor in tensors.values()}
    hidden = plain.hidden_size
    assert names["self_attn.q_a_proj.weight"] == (12, hidden)
    assert names["self_attn.q_b_proj.weight"] == (4 * (8 + 4), 12)
    assert names["self_attn.kv_a_proj_with_mqa.weight"] == (16 + 4, hidden)
    assert names["self_attn.kv_a_layernorm.weight"] == (16,)
    assert names["self_attn.kv_b_proj.weight"] == (4 * (8 + 6), 16)
    assert names["self_attn.o_proj.weight"] == (hidden, 4 * 6)
    assert names["mlp.gate.weight"] == (3, hidden)
    assert names["mlp.gate.e_score_correction_bias"] == (3,)
    assert names["mlp.experts.2.down_proj.weight"] == (hidden, 10)
    assert names["mlp.shared_experts.up_proj.weight"] == (20, hidden)
    assert tensors["layers.0.router"].wide and not tensors["layers.0.q_a"].wide
    shapes = {tensor.name: tensor.stored_shape for tensor in tensors.values()}
    shapes["model.layers.1.eh_proj.weight"] = (1, 1)  # of the layer for multi-token prediction
    found = match_names(dataclasses.replace(plain, layers=(layer,), mtp_layers=1), shapes, "hf", shapes)
    found.require("file")
    assert match_names(dataclasses.replace(plain, layers=(layer,)), shapes, "hf", shapes).extra


def test_rotated_rows_alone_are_put_back_as_halves() -> None:
    latent = LatentAttention(2, None, 6, 3, 4, 6, 0.25, interleaved=True)
    plain = spec()
    layer = LayerSpec(latent, plain.layers[0].feed_forward, plain.norm)
    tensors = expected_tensors(dataclasses.replace(plain, layers=(layer,)))
    # Pairs (0, 1), (2, 3) become (0, 2), (1, 3) behind the rows that do not turn, in each head.
    assert row_order(tensors["layers.0.q"]) == [0, 1, 2, 3, 5, 4, 6, 7, 8, 9, 10, 12, 11, 13]
    assert row_order(tensors["layers.0.kv_a"]) == [0, 1, 2, 3, 4, 5, 6, 8, 7, 9]
    assert row_order(tensors["layers.0.kv_b"]) is None
