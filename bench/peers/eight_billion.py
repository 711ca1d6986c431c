"""A GGUF file of Llama 3.1 8B's shapes in Q4_K_M with random weights: what people run, without the download.

python bench/peers/eight_billion.py OUT.gguf [--layers 32]

Types are those that llama.cpp's Q4_K_M gives: Q4_K, and Q6_K for the head and for the value and down projections of
half of the layers. Quants are random bits; factors make weights of mean 0 and a deviation near 0.02. The
vocabulary is SmolLM2's, filled up with tokens that no text has.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType

from kvist.spec.source import resolve

HIDDEN, FFN, HEADS, KV_HEADS, WIDTH, VOCAB = 4096, 14336, 32, 8, 128, 128_256
Q4_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K
RANDOM = np.random.default_rng(8)
Bytes = npt.NDArray[np.uint8]


def blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> Bytes:
    """``rows`` rows of random blocks of 256 weights."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    count = rows * columns // 256
    found = RANDOM.integers(0, 256, (count, size), dtype=np.uint8)
    spread = RANDOM.uniform(0.8, 1.2, count)
    if kind == Q4_K:  # d, dmin, twelve bytes of 6-bit factors, quants 0..15: d * sc * q - dmin * m
        d = (1.0e-4 * spread).astype(np.float16)
        found[:, 0:2] = d.view(np.uint8).reshape(-1, 2)
        found[:, 2:4] = (7.5 * d).astype(np.float16).view(np.uint8).reshape(-1, 2)
    else:  # low and high bits of quants -32..31, sixteen signed factors, d
        found[:, -2:] = (1.4e-5 * spread).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return found.reshape(rows, columns // 256 * size)


def tensors(layers: int) -> Iterator[tuple[str, GGMLQuantizationType, int, int]]:
    """Name, type, rows and columns of every matrix."""
    yield "token_embd.weight", Q4_K, VOCAB, HIDDEN
    for i in range(layers):
        more = Q6_K if i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2 else Q4_K
        yield f"blk.{i}.attn_q.weight", Q4_K, HEADS * WIDTH, HIDDEN
        yield f"blk.{i}.attn_k.weight", Q4_K, KV_HEADS * WIDTH, HIDDEN
        yield f"blk.{i}.attn_v.weight", more, KV_HEADS * WIDTH, HIDDEN
        yield f"blk.{i}.attn_output.weight", Q4_K, HIDDEN, HEADS * WIDTH
        yield f"blk.{i}.ffn_gate.weight", Q4_K, FFN, HIDDEN
        yield f"blk.{i}.ffn_up.weight", Q4_K, FFN, HIDDEN
        yield f"blk.{i}.ffn_down.weight", more, HIDDEN, FFN
    yield "output.weight", Q6_K, VOCAB, HIDDEN


def write(target: Path, layers: int) -> None:
    """Write the file, tensor by tensor: memory stays at one matrix."""
    small = GGUFReader(resolve("smollm2").path)
    writer = GGUFWriter(target, "llama")
    writer.add_name(f"random weights, Llama 3.1 8B's shapes, {layers} layers")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_K_M)
    for field, value in {
        "block_count": layers,
        "context_length": 131_072,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": WIDTH,
        "vocab_size": VOCAB,
    }.items():
        writer.add_uint32(f"llama.{field}", value)
    writer.add_float32("llama.rope.freq_base", 500_000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, field in small.fields.items():
        if not name.startswith("tokenizer.") or name.endswith((".tokens", ".token_type")):
            continue
        sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub)
    known = small.fields["tokenizer.ggml.tokens"].contents()
    kinds = small.fields["tokenizer.ggml.token_type"].contents()
    spare = VOCAB - len(known)
    writer.add_token_list([*known, *(f"<|unused {i}|>" for i in range(spare))])
    writer.add_token_types([*kinds, *[int(gguf.TokenType.UNUSED)] * spare])
    norms = ["output_norm.weight", *(f"blk.{i}.{n}_norm.weight" for i in range(layers) for n in ("attn", "ffn"))]
    for name in norms:
        writer.add_tensor_info(name, (HIDDEN,), np.dtype(np.float32), HIDDEN * 4)
    for name, kind, rows, columns in tensors(layers):
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
        width = columns // size * nbytes
        writer.add_tensor_info(name, (rows, width), np.dtype(np.uint8), rows * width, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _ in norms:
        writer.write_tensor_data(np.ones(HIDDEN, dtype=np.float32))
    for _, kind, rows, columns in tensors(layers):
        writer.write_tensor_data(blocks(kind, rows, columns))
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    write(options.out, options.layers)
