"""Small configs of every family that can be run, as ``transformers`` writes them, and random models of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers import PretrainedConfig, PreTrainedModel

import hf_models

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WIDE: dict[str, Any] = {**COMMON, "head_dim": 16}
# Factors that grow with the channel pair, one list for each range.
SHORT, LONG = [1.0, 1.1, 1.3, 1.6], [1.5, 2.5, 4.0, 8.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "rope_theta": 1e4}
FALCON: dict[str, Any] = {k: v for k, v in COMMON.items() if k not in ("intermediate_size", "num_key_value_heads")}
NEOX: dict[str, Any] = {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
}

# The first range ends inside the tests' texts, and both factors differ from 1 and from each other.
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.3,
    "mscale_all_dim": 0.6,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MLA: dict[str, Any] = {
    **{**COMMON, "num_attention_heads": 4, "num_key_value_heads": 4},
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    **ENDS,
}
DEEPSEEK: dict[str, Any] = {
    **MLA,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "rope_parameters": YARN,
}
EXPERTS: dict[str, Any] = {**WIDE, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "mistral": lambda: hf.MistralConfig(**COMMON, sliding_window=None),
    "mistral window": lambda: hf.MistralConfig(**COMMON, sliding_window=40),
    "mistral head_dim": lambda: hf.MistralConfig(**{**COMMON, "head_dim": 24}, sliding_window=None, rope_theta=1e6),
    "qwen2": lambda: hf.Qwen2Config(**COMMON, use_sliding_window=False, sliding_window=40, tie_word_embeddings=True),
    "qwen2 windows": lambda: hf.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=40, max_window_layers=1),
    "qwen3": lambda: hf.Qwen3Config(**WIDE, rope_theta=1e6),
    "smollm3": lambda: hf.SmolLM3Config(
        **{**COMMON, "num_hidden_layers": 5}, pad_token_id=0, bos_token_id=1, eos_token_id=2
    ),
    "smollm3 list": lambda: hf.SmolLM3Config(
        **COMMON, no_rope_layers=[1, 0, 1], pad_token_id=0, bos_token_id=1, eos_token_id=2
    ),
    "gemma": lambda: hf.GemmaConfig(**WIDE),
    "gemma2": lambda: hf.Gemma2Config(
        **WIDE,
        sliding_window=40,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma2 by width": lambda: hf.Gemma2Config(**WIDE, sliding_window=40, query_pre_attn_scalar=16),
    "gemma2 uncapped": lambda: hf.Gemma2Config(
        **WIDE, sliding_window=17, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "olmo2": lambda: hf.Olmo2Config(**COMMON, pad_token_id=0, eos_token_id=2),
    "granite": lambda: hf.GraniteConfig(**COMMON, **GRANITE),
    "granite biases": lambda: hf.GraniteConfig(**COMMON, **GRANITE, attention_bias=True, mlp_bias=True),
    "phi3": lambda: hf.Phi3Config(**COMMON, pad_token_id=0, eos_token_id=2),
    "phi3 window": lambda: hf.Phi3Config(**COMMON, sliding_window=40, pad_token_id=0, eos_token_id=2),
    "phi3 longrope": lambda: hf.Phi3Config(
        **COMMON, original_max_position_embeddings=128, rope_parameters=LONGROPE, pad_token_id=0, eos_token_id=2
    ),
    "phi3 longrope, half": lambda: hf.Phi3Config(
        **{**COMMON, "num_attention_heads": 3, "num_key_value_heads": 1},
        original_max_position_embeddings=128,
        rope_parameters={**LONGROPE, "partial_rotary_factor": 0.5},
        pad_token_id=0,
        eos_token_id=2,
    ),
    "starcoder2": lambda: hf.Starcoder2Config(**COMMON, sliding_window=None, bos_token_id=1, eos_token_id=2),
    "starcoder2 window": lambda: hf.Starcoder2Config(**COMMON, sliding_window=40, bos_token_id=1, eos_token_id=2),
    "starcoder2 no bias": lambda: hf.Starcoder2Config(**COMMON, use_bias=False, bos_token_id=1, eos_token_id=2),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=97, n_positions=512, n_embd=48, n_layer=3, n_head=6, bos_token_id=1, eos_token_id=2
    ),
    "gpt2 inner": lambda: hf.GPT2Config(
        vocab_size=97, n_positions=512, n_embd=40, n_layer=2, n_head=4, n_inner=72, bos_token_id=1, eos_token_id=2
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**{**NEOX, "num_attention_heads": 3}, rotary_pct=0.25),
    "gpt_neox in turn": lambda: hf.GPTNeoXConfig(**NEOX, use_parallel_residual=False, rotary_pct=1.0),
    "falcon": lambda: hf.FalconConfig(**FALCON, bos_token_id=1, eos_token_id=2),
    "falcon, all heads": lambda: hf.FalconConfig(
        **FALCON, multi_query=False, bias=True, bos_token_id=1, eos_token_id=2
    ),
    "falcon, two norms": lambda: hf.FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=2, bos_token_id=1, eos_token_id=2
    ),
    "falcon, groups and one norm": lambda: hf.FalconConfig(
        **FALCON,
        new_decoder_architecture=True,
        num_kv_heads=3,
        num_ln_in_parallel_attn=1,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "falcon in turn": lambda: hf.FalconConfig(**FALCON, parallel_attn=False, bias=True, bos_token_id=1, eos_token_id=2),
    "qwen2 yarn": lambda: hf.Qwen2Config(**COMMON, rope_parameters=YARN),
    "mistral yarn": lambda: hf.MistralConfig(
        **COMMON,
        sliding_window=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "truncate": False,
        },
    ),
    "deepseek_v2": lambda: hf.DeepseekV2Config(**{**DEEPSEEK, "q_lora_rank": None}, n_shared_experts=2),
    "deepseek_v2 groups": lambda: hf.DeepseekV2Config(
        **DEEPSEEK, n_shared_experts=2, topk_method="group_limited_greedy", n_group=4, topk_group=2
    ),
    "deepseek_v2 dense": lambda: hf.DeepseekV2Config(
        **{**DEEPSEEK, "first_k_dense_replace": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        attention_bias=True,
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**DEEPSEEK, n_shared_experts=1, n_group=4, topk_group=2),
    "deepseek_v3 halves": lambda: hf.DeepseekV3Config(
        **{**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 0},
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        rope_interleave=False,
        norm_topk_prob=False,
        attention_bias=True,
    ),
    "glm4_moe_lite": lambda: hf.Glm4MoeLiteConfig(
        **{**{k: v for k, v in DEEPSEEK.items() if k != "first_k_dense_replace"}, "num_hidden_layers": 4},
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        mlp_layer_types=["sparse", "dense", "sparse", "dense"],
    ),
    "minicpm3": lambda: hf.MiniCPM3Config(
        **MLA,
        scale_emb=3,
        scale_depth=1.4,
        dim_model_base=32,
        rope_parameters={**LONGROPE, "factor": 4.0, "original_max_position_embeddings": 128},
    ),
    "minicpm3 plain": lambda: hf.MiniCPM3Config(
        **{**MLA, "q_lora_rank": None, "num_hidden_layers": 2}, scale_emb=1, tie_word_embeddings=False
    ),
    "mixtral": lambda: hf.MixtralConfig(**COMMON, num_local_experts=5, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**EXPERTS, norm_topk_prob=True),
    "qwen3_moe in turn": lambda: hf.Qwen3MoeConfig(
        **{**EXPERTS, "num_hidden_layers": 5}, decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=False
    ),
    "olmoe": lambda: hf.OlmoeConfig(**COMMON, num_experts=8, num_experts_per_tok=3, **ENDS),
}
# What no GGUF file says (a query scalar, which layers do not rotate), or what llama.cpp has no name for.
ABSENT = (
    "gemma2",
    "qwen2 windows",
    "smollm3 list",
    "gemma2 uncapped",
    "starcoder2 window",
    "phi3 window",
    "falcon in turn",
)
# What is not read from GGUF files: YaRN, latents, experts.
_NOT_READ = ("qwen2 yarn", "mistral yarn", "deepseek", "minicpm3", "mixtral", "qwen3_moe", "olmoe", "glm4")
IN_GGUF = [kind for kind in CONFIGS if kind not in ABSENT and not kind.startswith(_NOT_READ)]
_CENTRED_ON_ZERO = ("gemma",)  # families whose norms store w - 1


@torch.no_grad()
def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Every tensor random, with what ``transformers`` starts at zero or one (biases, norms) moved away from it."""
    torch.manual_seed(11)
    model = hf_models.model_of(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            ones = name.endswith("weight") and not config.model_type.startswith(_CENTRED_ON_ZERO)
            parameter.copy_(float(ones) + 0.3 * torch.randn_like(parameter))
        else:
            parameter.normal_(std=2 / parameter.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)  # of the size of what sigmoid scores differ by
    return model
