"""Generation is bound by reading: tokens per second against context.

To write one token, all weights and the sequence's whole cache are read once, so bandwidth divided by those bytes is the
most that any engine can reach. At short contexts the weights are most of it; further on the cache is, and a smaller
cache is a faster model.
"""

import sys

import kvist

device = sys.argv[1] if len(sys.argv) > 1 else "h100"
shape = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
shape |= {"intermediate_size": 11008, "vocab_size": 32000, "tie_word_embeddings": False}
result, exact = {}, []
for name, heads in [("32 kv heads", 32), ("8 kv heads", 8)]:
    config = shape | {"num_key_value_heads": heads}
    plan = kvist.plan(config, ctx_size=131072, kv_cache_dtype="bfloat16", weights_dtype="bfloat16", device=device)
    result[name] = [[point.ctx, point.tokens_per_second] for point in plan.roofline]
    for point in plan.roofline:
        read = (plan.weights_bytes + point.ctx * plan.growing_bytes_per_token) * point.tokens_per_second
        exact.append(f"{read:.9e}" == f"{plan.device.bandwidth:.9e}")
result["device"], result["bandwidth"] = plan.device.name, plan.device.bandwidth
print(
    f"LLaMA-7B's shape in bfloat16 on {device}, which reads {plan.device.bandwidth / 1e9:,.0f} GB/s: tokens/s at most"
)
print(" context   32 kv heads   8 kv heads")
for (ctx, mha), (_, gqa) in list(zip(result["32 kv heads"], result["8 kv heads"], strict=True))[::2]:
    print(f"{ctx:8,}   {mha:11.1f}   {gqa:10.1f}")

checks = {"at every context, tokens/s times the bytes of a token is the bandwidth": all(exact)}
assert all(checks.values()), checks
