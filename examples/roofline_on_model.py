"""Generation is bound by reading, on a real model: tokens per second against depth.

The limit is the bandwidth of this machine's memory, just measured, divided by the weights and the cache that one token
reads. Measured is the fastest step at each depth; the gap to the limit is everything that is not reading.
"""

import sys
import time

import kvist
from kvist.learn import prose

model, depths = sys.argv[1], (128, 512, 1024, 2048, 4096)
plan = kvist.plan(model, ctx_size=depths[-1], kv_cache_dtype="bfloat16", device="this")
limits = {point.ctx: point.tokens_per_second for point in plan.roofline}
llm = kvist.load(model, ctx_size=depths[-1] + 32, kv_cache_dtype="bfloat16")
ids = llm.tokenizer.encode(prose()[: 12 * depths[-1]])
result = {"model": model, "bandwidth": plan.device.bandwidth, "kernels": llm.setup.kernels, "points": []}
print(f"{model} on {llm.setup.kernels}; memory reads {plan.device.bandwidth / 1e9:.1f} GB/s")
print("  depth   bytes read per token   tokens/s at most   measured")
for depth in depths:
    request = llm.engine.submit(ids[:depth], kvist.Sampling(max_tokens=16, ignore_eos=True))
    fastest = float("inf")
    while not request.finished:
        begin, decoding = time.perf_counter(), len(request.generated) > 0
        llm.engine.step()
        fastest = min(fastest, time.perf_counter() - begin) if decoding else fastest
    read = plan.weights_bytes + depth * int(plan.growing_bytes_per_token)
    result["points"].append([depth, read, limits[depth], 1 / fastest])
    print("{:7,}   {:20,}   {:16.1f}   {:8.1f}".format(*result["points"][-1]))

checks = {
    "the pool takes as many bytes per token as the planner says": llm.setup.bytes_per_token
    == plan.growing_bytes_per_token
}
checks["all steps ran"] = llm.engine.metrics.generated_tokens == 16 * len(depths)
assert all(checks.values()), checks
