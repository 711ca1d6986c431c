"""Exercise 6. DeepSeek-V3 at 128k, both ways.

The same model is planned twice: with keys and values of all its heads, and with the latent and the rotated key that it
really keeps. A context of 128k may mean thousands or powers of two; the ratio at equal type is that of one row, and
depends on neither.
"""

import kvist

latent = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128}
latent |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
heads = {"model_type": "llama", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128}
heads |= {"hidden_size": 7168, "head_dim": 128}
result = []
print(f"{'tokens':>8} {'type':8} {'as MHA':>11} {'as a latent':>12} {'times less':>11}")
for tokens in (128_000, 131_072):
    for dtype in ("float32", "float16"):
        sizes = [
            kvist.plan(config, ctx_size=tokens, kv_cache_dtype=dtype).sequence_bytes / 2**30
            for config in (heads, latent)
        ]
        result.append([tokens, dtype, *sizes])
        print(f"{tokens:8,} {dtype:8} {sizes[0]:7.1f} GiB {sizes[1]:8.2f} GiB {sizes[0] / sizes[1]:10.1f}x")
mixed = result[0][2] / result[1][3]
print(f"float32 MHA against the float16 latent: {mixed:.1f}x, twice the ratio at equal type")

factor = kvist.plan(latent, ctx_size=1, kv_cache_dtype="float16").mha_factor
checks = {"every ratio at equal type is the planner's own factor": all(mha / mla == factor for *_, mha, mla in result)}
assert all(checks.values()), checks
