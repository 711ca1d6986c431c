"""Figure 27-5. The latent pipeline: compress a token once, expand it when it is read.

Multi-head latent attention stores one compressed vector c_KV per token, shared by all heads, and one rotated key beside
it. Every head's key and value are expanded from c_KV, so they need not be kept.
"""

import kvist
from kvist.learn import Generator

HEADS, WIDTH, RANK, ROPE = 8, 8, 16, 8
generator = Generator()
(w_dkv,) = generator.matrices(1, RANK, 64, 0.1)
w_uk, w_uv = (w.view(HEADS, WIDTH, RANK) for w in generator.matrices(2, HEADS * WIDTH, RANK, 0.1))
h = generator.vector(64, 0.5)
c_kv = kvist.latent.compress(h[None], w_dkv)
k, v = kvist.latent.expand(c_kv, w_uk, w_uv)
for name, x in [("h", h), ("c_KV", c_kv), ("K", k), ("V", v)]:
    print(f"{name:5} {x.numel():3} floats ", " ".join(f"{value:+.4f}" for value in x.flatten()[:6]), "...")


def floats(heads: int, width: int, rank: int, rope: int) -> tuple[int, int]:
    """Floats per token and layer: keys and values of all heads, and what the planner counts for the latent."""
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_attention_heads": heads, "v_head_dim": width}
    config |= {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": width}
    return 2 * heads * width, int(kvist.plan(config, ctx_size=1, kv_cache_dtype="float32").growing_bytes_per_token) // 4


result = {"c_kv": c_kv.flatten().tolist(), "K": k.flatten().tolist(), "V": v.flatten().tolist()}
for name, shape in [("toy", (HEADS, WIDTH, RANK, ROPE)), ("DeepSeek-V3", (128, 128, 512, 64))]:
    full, latent = floats(*shape)
    result[name] = [full, latent, f"{full / latent:.1f}x"]
    print(f"{name}: {full:,} floats per token and layer as MHA, {latent} as a latent: {full / latent:.1f}x")

checks = {"the planner counts the latent and the rotated key": result["toy"][1] == c_kv.numel() + ROPE}
checks["and plain attention would keep what was expanded"] = result["toy"][0] == k.numel() + v.numel()
assert all(checks.values()), checks
