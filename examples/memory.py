"""Figure 27-4. What the cache of real models takes.

Bytes per token are 2 x layers x kv heads x head_dim x bytes of an element, and a GB here is 2^30 bytes. LLaMA-2-70B
shares its kv heads between query heads and keeps that much less. The two rows of DeepSeek-V3 compare float32 with
float16: that part of their factor is the type, and only the rest is the latent's doing.
"""

import kvist


def llama(layers: int, heads: int, kv_heads: int) -> dict:
    shape = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {"model_type": "llama", "hidden_size": heads * 128, "head_dim": 128, **shape}


gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}
deepseek = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128}
deepseek |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
result = []
for name, config, tokens, dtype in [
    ("GPT-2 Small", gpt2, 1024, "float32"),
    ("LLaMA-7B", llama(32, 32, 32), 4096, "float32"),
    ("LLaMA-2-70B as if MHA", llama(80, 64, 64), 4096, "float32"),
    ("LLaMA-2-70B, 8 kv heads", llama(80, 64, 8), 4096, "float32"),
    ("DeepSeek-V3 as if MHA", llama(61, 128, 128), 128_000, "float32"),
    ("DeepSeek-V3, latent", deepseek, 128_000, "float16"),
]:
    plan = kvist.plan(config, ctx_size=tokens, kv_cache_dtype=dtype)
    size = plan.sequence_bytes / 2**30
    shown = f"{size * 1024:.0f} MB" if size < 1 else f"{size:.2f} GB" if size < 4 else f"{size:.1f} GB"
    print(f"{name:24} {dtype}  {int(plan.growing_bytes_per_token):9,} B/token x {tokens:7,} tokens = {shown:>8}")
    result.append([name, dtype, int(plan.growing_bytes_per_token), tokens, plan.sequence_bytes, shown])
ratio = result[4][4] / result[5][4]
print(f"{result[4][5]} to {result[5][5]}: {ratio:.1f}x, of which 2 is the type; at equal type {ratio / 2:.1f}x")

layer = kvist.LayerCache(12, 64, capacity=1024)
checks = {"twelve layers of GPT-2's shape, allocated, take the planned bytes": 12 * layer.nbytes == result[0][4]}
assert all(checks.values()), checks
