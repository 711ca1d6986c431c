"""Configs of DeepSeek's kind: what is read, and that everything else is refused by the name of its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deepseek_configs import V2_LITE, V3
from kvist.base.errors import BadValue, KvistError, MissingField, SpecError
from kvist.spec.from_config import model_spec
from kvist.spec.model import FeedForward, LatentAttention, MixtureOfExperts, Rope, Yarn
from kvist.spec.rope import attention_factor, inverse_frequencies, score_factor


def test_deepseek_v3() -> None:
    spec = model_spec(V3)
    attention = spec.layers[5].attention
    assert isinstance(attention, LatentAttention) and attention.rope is not None
    assert (attention.num_heads, attention.q_lora_rank, attention.kv_lora_rank) == (128, 1536, 512)
    assert (attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim) == (128, 64, 128)
    assert attention.interleaved and attention.latent_eps == 1e-6
    assert attention_factor(attention.rope) == 1.0
    assert math.isclose(attention.scale, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert [type(layer.feed_forward) for layer in spec.layers[:4]] == [*[FeedForward] * 3, MixtureOfExperts]
    experts = MixtureOfExperts(256, 8, 2048, "silu", 2048, "sigmoid", 8, 4, "top2", True, True, 2.5)
    assert spec.layers[60].feed_forward == experts
    assert (spec.mtp_layers, spec.fp8_block) == (1, (128, 128))


def test_deepseek_v2_lite() -> None:
    spec = model_spec(V2_LITE)
    attention = spec.layers[1].attention
    assert isinstance(attention, LatentAttention) and attention.rope is not None
    assert attention.q_lora_rank is None and spec.fp8_block is None and spec.mtp_layers == 0
    assert math.isclose(attention.scale, 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert spec.layers[1].feed_forward == MixtureOfExperts(64, 6, 1408, "silu", 2816)


def test_yarn_without_one_of_its_factors() -> None:
    def rope(**changes: Any) -> Rope:
        return Rope(1e4, 64, Yarn(40.0, 4096, **changes))

    assert attention_factor(rope(mscale=1.3, mscale_all_dim=0.6)) == pytest.approx(
        (0.13 * math.log(40) + 1) / (0.06 * math.log(40) + 1)
    )
    assert score_factor(rope(mscale=1.3, mscale_all_dim=0.6)) == pytest.approx((0.06 * math.log(40) + 1) ** 2)
    assert attention_factor(rope()) == attention_factor(rope(mscale=1.0)) == pytest.approx(0.1 * math.log(40) + 1)
    assert attention_factor(rope(attention_factor=0.8)) == 0.8
    assert score_factor(rope()) == score_factor(Rope(1e4, 64)) == score_factor(None) == 1.0
    assert attention_factor(Rope(1e4, 64, Yarn(0.5, 4096))) == 1.0


def test_yarn_keeps_the_fast_pairs_and_divides_the_slow_ones() -> None:
    plain, scaled = inverse_frequencies(Rope(1e4, 64)), inverse_frequencies(Rope(1e4, 64, Yarn(40.0, 4096)))
    ratios = [round(a / b, 4) for a, b in zip(plain, scaled, strict=True)]  # float32 divisions
    assert ratios[0] == 1.0 and ratios[-1] == pytest.approx(40.0)
    assert ratios == sorted(ratios) and 1.0 < ratios[16] < 40.0


def test_layers_that_have_experts() -> None:
    def sparse(**changes: Any) -> list[bool]:
        config = {**V3, "num_hidden_layers": 4, "first_k_dense_replace": 1, **changes}
        return [isinstance(layer.feed_forward, MixtureOfExperts) for layer in model_spec(config).layers]

    assert sparse() == [False, True, True, True]
    assert sparse(first_k_dense_replace=4) == [False] * 4
    assert sparse(model_type="glm4_moe_lite", first_k_dense_replace=None) == [False, True, True, True]
    assert sparse(mlp_layer_types=["sparse", "dense", "sparse", "dense"]) == [True, False, True, False]
    with pytest.raises(BadValue, match=r"mlp_layer_types\[1\] = 'moe'; known are dense, sparse"):
        sparse(mlp_layer_types=["sparse", "moe", "sparse", "dense"])


@pytest.mark.parametrize(
    ("base", "changes", "error", "words"),
    [
        (V3, {"topk_method": "greedy"}, BadValue, "topk_method 'greedy' is not supported; use one of noaux_tc"),
        (V3, {"scoring_func": "softmax"}, BadValue, "scoring_func 'softmax' is not supported here; sigmoid is"),
        (V3, {"moe_layer_freq": 2}, BadValue, "moe_layer_freq = 2 cannot be run in deepseek_v3; only 1"),
        (V3, {"n_group": 7}, BadValue, "256 experts do not divide into n_group = 7"),
        (V3, {"topk_group": 9}, BadValue, "topk_group = 9 is outside 1..8"),
        (V3, {"num_experts_per_tok": 200}, BadValue, "hold 128 experts"),
        (V3, {"n_group": 256, "topk_group": 256}, BadValue, "groups of 1 expert have no two best"),
        (V3, {"n_group": None}, MissingField, "'n_group' is missing"),
        (V3, {"n_routed_experts": None}, MissingField, "'n_routed_experts' is missing"),
        (V3, {"routed_scaling_factor": None}, MissingField, "'routed_scaling_factor' is missing"),
        (V3, {"kv_lora_rank": None}, MissingField, "'kv_lora_rank' is missing"),
        (V3, {"q_lora_rank": "absent"}, MissingField, "'q_lora_rank' is missing .null where queries"),
        (V3, {"qk_rope_head_dim": 63}, BadValue, "63 rotary channels"),
        (V3, {"v_head_dim": None, "hidden_size": 7169}, MissingField, "'v_head_dim' is missing"),
        (V2_LITE, {"topk_method": "noaux_tc"}, BadValue, "topk_method 'noaux_tc' is not supported"),
        (V2_LITE, {"norm_topk_prob": True}, BadValue, "norm_topk_prob = True cannot be run in deepseek_v2; only False"),
        (V2_LITE, {"mlp_bias": True}, BadValue, "mlp_bias = True"),
    ],
)
def test_refusals(base: dict[str, Any], changes: dict[str, Any], error: type[KvistError], words: str) -> None:
    config = {name: value for name, value in {**base, **changes}.items() if value != "absent"}
    with pytest.raises(error, match=words):
        model_spec(config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "fp8"}, r"\(fp8\)"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, r"\(fp8\)"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size has 1 extents"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size\[0\] = 0 is outside"),
        ({"quant_method": "modelopt", "weight_block_size": [128, 128]}, r"\(modelopt\)"),
    ],
)
def test_other_float8_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((SpecError, BadValue), match=words):
        model_spec({**V3, "quantization_config": settings})
