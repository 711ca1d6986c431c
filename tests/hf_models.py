"""Models of ``transformers`` to hold kvist against: the bundled GGUF files, and small random ones saved as folders.

Nothing here comes from kvist: the file's header is read by a reader of its own (``gguf.GGUFReader`` takes many seconds
over a large vocabulary), tensors are dequantised by the ``gguf`` package, and the configs are the published ones.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PretrainedConfig, PreTrainedModel

# The published config.json of HuggingFaceTB/SmolLM2-135M-Instruct and of google/gemma-3-270m.
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=100_000.0,
    tie_word_embeddings=True,
)
GEMMA3 = Gemma3TextConfig(
    vocab_size=262_144,
    hidden_size=640,
    intermediate_size=2048,
    num_hidden_layers=18,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    max_position_embeddings=32_768,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    rope_local_base_freq=10_000.0,
    sliding_window=512,
    tie_word_embeddings=True,
)
CONFIGS: dict[str, PretrainedConfig] = {"smollm2": SMOLLM2, "gemma3": GEMMA3}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "",  # what follows attention without post norms, what precedes the feed forward with them
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def bundled(path: Path, config: PretrainedConfig) -> PreTrainedModel:
    """The GGUF file at ``path`` as a float32 model of ``transformers`` with eager attention."""
    gemma = isinstance(config, Gemma3TextConfig)
    state: dict[str, Tensor] = {}
    for name, tensor in dequantised(path):
        value = torch.from_numpy(tensor)
        if not gemma and name.endswith(("attn_q.weight", "attn_k.weight")):
            # llama.cpp keeps the two halves of every head interleaved.
            heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
            value = value.view(heads, -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape).contiguous()
        if gemma and name.endswith("norm.weight"):
            value = value - 1  # the file has the 1 of (1 + weight) added
        state[hf_name(name, gemma)] = value
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    return model_of(config, state)


def model_of(config: PretrainedConfig, state: dict[str, Tensor] | None = None) -> PreTrainedModel:
    """A float32 model with eager attention: with the weights of ``state``, or random ones."""
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    if state is None:
        model = kind._from_config(config, dtype=torch.float32, attn_implementation="eager")
    else:
        model, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    assert model.config._attn_implementation == "eager"
    return model.eval()


@torch.inference_mode()
def hidden(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Final normalised states [T, hidden] of ``tokens`` in one forward without a cache."""
    body = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    return body(input_ids=torch.tensor([list(tokens)]), use_cache=False).last_hidden_state[0]


@torch.inference_mode()
def logits(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Logits [R, vocab] of some of the ``hidden`` states: by part, since a vocabulary is large."""
    return model.get_output_embeddings()(states)


def hf_name(name: str, gemma: bool) -> str:
    """The name of a GGUF tensor in ``transformers``."""
    parts = name.split(".")
    if parts[0] != "blk":
        return f"{_TOP[parts[0]]}.{parts[1]}"
    role = _LAYER[parts[2]] or ("pre_feedforward_layernorm" if gemma else "post_attention_layernorm")
    return f"model.layers.{parts[1]}.{role}.{parts[3]}"


def dequantised(path: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Every tensor of a GGUF file as float32, by its name in the file."""
    data = np.memmap(path, mode="r")
    tensors, base = header(data)
    for name, shape, kind, offset in tensors:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        width = shape[-1] // block * size
        rows = int(np.prod(shape[:-1]))
        raw = np.asarray(data[base + offset :][: rows * width]).reshape(rows, width)
        out = np.empty((rows, shape[-1]), np.float32)
        for start in range(0, rows, 4096):  # the package unpacks in float64-sized pieces: keep them small
            out[start : start + 4096] = gguf.quants.dequantize(raw[start : start + 4096], kind)
        yield name, out.reshape(shape)


def header(data: np.ndarray[Any, Any]) -> tuple[list[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]], int]:
    """(name, shape, type, offset) of every tensor, and where the data begins. Metadata is skipped, not read."""
    buffer, at = memoryview(data), 0

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        found = struct.unpack_from(f"<{form}", buffer, at)
        at += struct.calcsize(f"<{form}")
        return found

    def text() -> str:
        nonlocal at
        (size,) = take("Q")
        at += size
        return bytes(buffer[at - size : at]).decode(errors="replace")

    def value(kind: int) -> Any:
        nonlocal at
        if kind == _STRING:
            return text()
        if kind != _ARRAY:
            return take(_SCALARS[kind])[0]
        inner, count = take("IQ")
        if inner == _STRING:
            for _ in range(count):
                (size,) = take("Q")
                at += size
        else:
            at += count * struct.calcsize(f"<{_SCALARS[inner]}")
        return None

    magic, version, num_tensors, num_values = take("4sIQQ")
    assert magic == b"GGUF" and version >= 2
    alignment = 32
    for _ in range(num_values):
        key, (kind,) = text(), take("I")
        found = value(kind)
        if key == "general.alignment":
            alignment = found
    tensors = []
    for _ in range(num_tensors):
        name, (rank,) = text(), take("I")
        shape = tuple(reversed(take(f"{rank}Q")))
        kind, offset = take("IQ")
        tensors.append((name, shape, gguf.GGMLQuantizationType(kind), offset))
    return tensors, -(-at // alignment) * alignment
