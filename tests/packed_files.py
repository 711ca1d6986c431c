"""GGUF blocks with arbitrary quants, and small GGUF models of them, written by the ``gguf`` package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from kvist.kernels.native import NativeBackend
from kvist.kernels.packed import FACTORS, PackedWeight
from kvist.spec.gguf_types import BY_NAME, IDS

# About the deviation of arbitrary quants times their integer factors.
SPREAD = {
    **dict.fromkeys(("q4_0", "q4_1"), 4.6),
    **dict.fromkeys(("q5_0", "q5_1"), 9.2),
    "q8_0": 74.0,
    "q4_k": 170.0,
    "q5_k": 330.0,
    "q6_k": 1400.0,
}


def blocks(kind: str, rows: int, k: int, seed: int = 0, size: float = 0.01) -> np.ndarray:
    """uint8 [rows, bytes of a row]: any quants, half-precision factors of about ``size``."""
    draw = np.random.default_rng(seed)
    stored = BY_NAME[kind]
    raw = draw.integers(0, 256, (rows, k // stored.elements, stored.nbytes), dtype=np.uint8)
    for at in FACTORS.get(kind, ()):
        halves = (draw.standard_normal((rows, k // stored.elements)) * size).astype(np.float16)
        raw[:, :, at : at + 2] = halves.view(np.uint8).reshape(rows, -1, 2)
    return np.ascontiguousarray(raw.reshape(rows, -1))


def unpacked(raw: np.ndarray, kind: str) -> Tensor:
    """What the ``gguf`` package makes of the blocks, float32 [rows, k]."""
    with np.errstate(all="ignore"):  # hostile factors overflow on purpose
        return torch.from_numpy(np.array(dequantize(raw, GGMLQuantizationType(IDS[kind])), dtype=np.float32))


def filled(backend: NativeBackend, raw: np.ndarray, kind: str, k: int, glu: bool = False) -> PackedWeight:
    """A packed weight of the blocks."""
    weight = backend.packed([(len(raw), kind)], k, glu)
    weight.fill_gguf(raw.ctypes.data, IDS[kind], len(raw), torch.arange(len(raw)))
    return weight


def write_llama(path: Path, kinds: dict[str, str], hidden: int = 256, ffn: int = 512, vocab: int = 320) -> Path:
    """A two-layer Llama with random blocks; ``kinds`` gives types by the tensor's role, "" of all others."""
    writer = gguf.GGUFWriter(str(path), "llama")
    heads, kv_heads = 4, 2
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", *(f"t{i}" for i in range(3, vocab))])
    writer.add_token_types([1] * vocab)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (vocab, hidden)}
    for layer in range(2):
        at = f"blk.{layer}."
        kv = hidden // heads * kv_heads
        shapes |= {
            f"{at}attn_q": (hidden, hidden),
            f"{at}attn_k": (kv, hidden),
            f"{at}attn_v": (kv, hidden),
            f"{at}attn_output": (hidden, hidden),
            f"{at}ffn_gate": (ffn, hidden),
            f"{at}ffn_up": (ffn, hidden),
            f"{at}ffn_down": (hidden, ffn),
        }
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{at}{norm}.weight", np.ones(hidden, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, dtype=np.float32))
    for seed, (name, shape) in enumerate(shapes.items()):
        kind = kinds.get(name.rsplit(".", 1)[-1], kinds[""])
        if kind == "f16":
            values = np.random.default_rng(seed).standard_normal(shape) * 0.02
            writer.add_tensor(f"{name}.weight", values.astype(np.float16))
            continue
        raw = blocks(kind, *shape, seed=seed, size=0.03 / SPREAD.get(kind, 1.0))
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=GGMLQuantizationType(IDS[kind]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
