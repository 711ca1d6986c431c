"""Generation is bound by reading, on a real model: tokens per second against depth.

The limit is the bandwidth of this machine's memory, just measured, divided by the weights and the cache that one token
reads. Measured is the fastest step at each depth; the gap to the limit is everything that is not reading.
"""

import sys
import time

import kvist
from kvist.learn import prose

model, depths = sys.argv[1], (128, 512, 1024, 2048, 4096)
llm = kvist.load(model, ctx_size=depths[-1] + 48, kv_cache_dtype="bfloat16")
ids = llm.tokenizer.encode(prose()[: 12 * depths[-1]])
plans, speeds = [], []
for depth in depths:
    plans.append(kvist.plan(model, ctx_size=depths[-1], kv_cache_dtype="bfloat16", device="this"))  # measures memory
    request = llm.engine.submit(ids[:depth], kvist.Sampling(max_tokens=32, ignore_eos=True))
    steps = []
    while not request.finished:
        begin, decoding = time.perf_counter(), request.generated != []
        llm.engine.step()
        steps += [time.perf_counter() - begin] * decoding
    speeds.append(1 / min(steps))

plan = max(plans, key=lambda plan: plan.device.bandwidth)
limits = {point.ctx: point.tokens_per_second for point in plan.roofline}
result = {"model": model, "bandwidth": plan.device.bandwidth, "kernels": llm.setup.kernels, "points": []}
print(f"{model} on {llm.setup.kernels}; memory reads {plan.device.bandwidth / 1e9:.1f} GB/s")
print("  depth   tokens/s at most   measured")
for depth, speed in zip(depths, speeds, strict=True):
    result["points"].append([depth, limits[depth], speed])
    print(f"{depth:7,}   {limits[depth]:16.1f}   {speed:8.1f}")

planned = plan.growing_bytes_per_token + plan.windowed_bytes_per_token
checks = {"a token takes as many bytes of the pool as planned": llm.setup.bytes_per_token == planned}
assert all(checks.values()), checks
