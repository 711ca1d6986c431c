"""Small models of ``transformers`` as GGUF files, with the names and the order of rows that llama.cpp's converter uses.

Written from the format's documentation and from what the converter is known to do; nothing here comes from kvist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedModel

# HF name (below the layer) to GGUF name; a matrix and its bias alike.
_LLAMA = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_POST = {
    **_LLAMA,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_NAMES: dict[str, dict[str, str]] = {
    "gemma2": _POST,
    "olmo2": _POST,
    "phi3": {**_LLAMA, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "starcoder2": {**_LLAMA, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "gpt2": {
        "ln_1": "attn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    },
    "gpt_neox": {
        "input_layernorm": "attn_norm",
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    "falcon": {
        "input_layernorm": "attn_norm",
        "ln_attn": "attn_norm_2",
        "ln_mlp": "attn_norm",
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
}
_TOP = {
    "embed_tokens": "token_embd",
    "wte": "token_embd",
    "wpe": "position_embd",
    "embed_in": "token_embd",
    "word_embeddings": "token_embd",
    "norm": "output_norm",
    "ln_f": "output_norm",
    "final_layer_norm": "output_norm",
    "lm_head": "output",
    "embed_out": "output",
}
_INTERLEAVED = ("llama", "mistral", "granite", "smollm3")
ARCHITECTURES = {"mistral": "llama", "gpt_neox": "gptneox"}


def save(model: PreTrainedModel, path: Path) -> Path:
    """``model`` as float32 GGUF."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata(config).items():
        name = f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if name.startswith(("lm_head", "embed_out")) and tied:
            continue
        gguf_name, value = converted(config, name, tensor)
        writer.add_tensor(gguf_name, value.float().contiguous().numpy())
    scaling = getattr(config, "rope_parameters", None) or {}
    for which in ("long", "short"):
        if scaling.get("rope_type") == "longrope":
            writer.add_tensor(f"rope_factors_{which}.weight", torch.tensor(scaling[f"{which}_factor"]).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata(config: Any) -> dict[str, Any]:
    """What the converter says of a model."""
    kind, heads, hidden = config.model_type, config.num_attention_heads, config.hidden_size
    rope = getattr(config, "rope_parameters", None) or {}
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    if kind == "falcon":
        kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
    inner = next(
        (v for n in ("intermediate_size", "n_inner", "ffn_hidden_size") if (v := getattr(config, n, None))), 4 * hidden
    )
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
    }
    if kind in ("starcoder2", "gpt2", "gpt_neox", "falcon"):
        eps = next(
            v for n in ("norm_epsilon", "layer_norm_epsilon", "layer_norm_eps") if (v := getattr(config, n, None))
        )
        found["attention.layer_norm_epsilon"] = eps
    else:
        found["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    if rope:
        found["rope.freq_base"] = float(rope["rope_theta"])
        found["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if kind in ("qwen3", "gemma", "gemma2", "mistral"):
        found["attention.key_length"] = found["attention.value_length"] = head_dim
    if getattr(config, "sliding_window", None) and kind in ("gemma2", "phi3", "mistral"):
        found["attention.sliding_window"] = config.sliding_window
    if kind == "gemma2":
        found["attn_logit_softcapping"] = config.attn_logit_softcapping
        found["final_logit_softcapping"] = config.final_logit_softcapping
    if kind == "granite":
        found["attention.scale"] = config.attention_multiplier
        found["embedding_scale"] = config.embedding_multiplier
        found["residual_scale"] = config.residual_multiplier
        found["logit_scale"] = config.logits_scaling
    if kind == "gpt_neox":
        found["use_parallel_residual"] = config.use_parallel_residual
    if rope.get("rope_type") == "longrope":
        original = rope["original_max_position_embeddings"]
        factor = config.max_position_embeddings / original
        found["rope.scaling.original_context_length"] = original
        found["rope.scaling.attn_factor"] = float(
            (1 + torch.tensor(factor).log() / torch.tensor(original).log()) ** 0.5
        )
    return found


def converted(config: Any, name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """The tensor's name in a GGUF file, and what the converter makes of its values."""
    kind, heads = config.model_type, config.num_attention_heads
    parts = name.split(".")
    layer = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if layer is None:
        return f"{_TOP[parts[-2]]}.{parts[-1]}", tensor + 1 if kind.startswith("gemma") and "norm" in name else tensor
    role, suffix = ".".join(parts[layer + 1 : -1]), parts[-1]
    if kind == "gpt2" and tensor.dim() > 1:
        tensor = tensor.T
    if kind.startswith("gemma") and "norm" in role:
        tensor = tensor + 1
    if kind in _INTERLEAVED and role in ("self_attn.q_proj", "self_attn.k_proj"):
        count = heads if "q_proj" in role else config.num_key_value_heads
        tensor = tensor.view(count, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if role.endswith("query_key_value"):
        groups = 1
        if kind == "gpt_neox" or not (config.new_decoder_architecture or config.multi_query):
            groups = heads
        elif config.new_decoder_architecture:
            groups = config.num_kv_heads
        width = config.hidden_size // heads
        grouped = tensor.view(groups, heads // groups + 2, width, *tensor.shape[1:])
        q, k, v = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
        tensor = torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in (q, k, v)])
    return f"blk.{parts[layer]}.{_NAMES.get(kind, _LLAMA)[role]}.{suffix}", tensor
