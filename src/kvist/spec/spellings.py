"""How each family spells its tensors, as data: HF and GGUF names of every role, and which of them are fused.

A scheme without ``qkv`` stores q, k and v apart; without ``gate_up``, gate and up. Of an expert's tensors, ``{}`` is
the expert's number. ``grouped``: the fused qkv holds, kv
head by kv head, the queries that read it, its key and its value. ``transposed``: matrices are stored [in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvist.spec.model import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Scheme:
    """The spelling of one file form. ``layer`` has the layer's index in place of ``{}``."""

    embed: str
    final_norm: str
    head: str
    layer: str
    roles: Mapping[str, str]
    positions: str = ""
    qkv: str | None = None
    gate_up: str | None = None
    grouped: bool = False
    transposed: bool = False


_COMMON = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b": "self_attn.kv_b_proj",
    "router": "mlp.gate",
    "router_bias": "mlp.gate.e_score_correction_bias",
    "experts.gate": "mlp.experts.{}.gate_proj",
    "experts.up": "mlp.experts.{}.up_proj",
    "experts.down": "mlp.experts.{}.down_proj",
    "shared_gate": "mlp.shared_experts.gate_proj",
    "shared_up": "mlp.shared_experts.up_proj",
    "shared_down": "mlp.shared_experts.down_proj",
}
# Without post norms the norm before the feed forward is called post_attention_layernorm; with them that name is taken.
_PLAIN = Scheme(
    "model.embed_tokens",
    "model.norm",
    "lm_head",
    "model.layers.{}.",
    {**_COMMON, "pre_ffn_norm": "post_attention_layernorm"},
)
_POST = replace(
    _PLAIN,
    roles={
        **_COMMON,
        "post_attention_norm": "post_attention_layernorm",
        "pre_ffn_norm": "pre_feedforward_layernorm",
        "post_ffn_norm": "post_feedforward_layernorm",
    },
)
_DENSE = {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h", "pre_ffn_norm": "post_attention_layernorm"}
_FALCON = Scheme(
    "transformer.word_embeddings",
    "transformer.ln_f",
    "lm_head",
    "transformer.h.{}.",
    {**_DENSE, "input_norm": "input_layernorm", "o": "self_attention.dense"},
    qkv="self_attention.query_key_value",
    grouped=True,
)
_HF: Mapping[str, Scheme] = {
    "mixtral": replace(
        _PLAIN,
        roles={
            **_PLAIN.roles,
            "router": "block_sparse_moe.gate",
            "experts.gate": "block_sparse_moe.experts.{}.w1",
            "experts.up": "block_sparse_moe.experts.{}.w3",
            "experts.down": "block_sparse_moe.experts.{}.w2",
        },
    ),
    "phi3": replace(_PLAIN, qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
    "starcoder2": replace(_PLAIN, roles={**_PLAIN.roles, "up": "mlp.c_fc", "down": "mlp.c_proj"}),
    "gpt2": Scheme(
        "transformer.wte",
        "transformer.ln_f",
        "lm_head",
        "transformer.h.{}.",
        {
            "input_norm": "ln_1",
            "o": "attn.c_proj",
            "pre_ffn_norm": "ln_2",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        },
        positions="transformer.wpe",
        qkv="attn.c_attn",
        transposed=True,
    ),
    "gpt_neox": Scheme(
        "gpt_neox.embed_in",
        "gpt_neox.final_layer_norm",
        "embed_out",
        "gpt_neox.layers.{}.",
        {**_DENSE, "input_norm": "input_layernorm", "o": "attention.dense"},
        qkv="attention.query_key_value",
        grouped=True,
    ),
    "falcon": _FALCON,
    "falcon, two norms": replace(_FALCON, roles={**_FALCON.roles, "input_norm": "ln_attn", "pre_ffn_norm": "ln_mlp"}),
}
_GGUF_PLAIN = Scheme(
    "token_embd",
    "output_norm",
    "output",
    "blk.{}.",
    {
        "input_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "o": "attn_output",
        "post_attention_norm": "post_attention_norm",
        "pre_ffn_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
        "post_ffn_norm": "post_ffw_norm",
    },
    positions="position_embd",
)
_GGUF_FUSED = replace(_GGUF_PLAIN, qkv="attn_qkv")
_GGUF: Mapping[str, Scheme] = {
    "phi3": replace(_GGUF_FUSED, gate_up="ffn_up"),
    "gpt2": _GGUF_FUSED,
    "gpt_neox": _GGUF_FUSED,
    "falcon": _GGUF_FUSED,
    # llama.cpp calls the feed forward's norm attn_norm, and the attention's attn_norm_2.
    "falcon, two norms": replace(
        _GGUF_FUSED, roles={**_GGUF_FUSED.roles, "input_norm": "attn_norm_2", "pre_ffn_norm": "attn_norm"}
    ),
}


def scheme_of(spec: ModelSpec, layer: LayerSpec, form: str) -> Scheme:
    """How files of ``form`` (``hf`` or ``gguf``) spell a model with such layers."""
    name = spec.family
    if name == "falcon" and layer.parallel and not layer.shared_norm:
        name = "falcon, two norms"
    if form == "gguf":
        return _GGUF.get(name, _GGUF_PLAIN)
    return _HF.get(name, _POST if layer.post_norms else _PLAIN)


def spelled(scheme: Scheme, role: str) -> str:
    """The name of ``role`` behind the layer's prefix; ``experts.7.gate`` is the gate of the expert with number 7."""
    if role == "qkv" and scheme.qkv:
        return scheme.qkv
    if role == "gate_up" and scheme.gate_up:
        return scheme.gate_up
    if role.startswith("experts."):
        _, number, part = role.split(".")
        return scheme.roles[f"experts.{part}"].format(number)
    return scheme.roles[role]
