"""Figure 27-3. Six tokens through a single-head cache.

Each word stores one key and one value and attends to all that are stored, as two products of a matrix and a vector.
Every word takes one projection; recomputing takes one for each word so far, for the same output.
"""

import torch

import kvist
from kvist.learn import Generator, close, product, same_bits, sentence, softmax

generator = Generator()
w_q, w_k, w_v = generator.matrices(3, 4, 6, 0.2)
(w_o,) = generator.matrices(1, 6, 4, 0.2)
words = torch.stack([x for _, x in sentence()])
cache, projected, steps, agree = kvist.LayerCache(1, 4, capacity=6), {"with": 0, "without": 0}, [], []
for pos, (word, x) in enumerate(sentence()):
    before, q = len(cache), product(w_q, x)
    cache.store_k(0, pos, product(w_k, x))
    cache.store_v(0, pos, product(w_v, x))
    projected["with"] += 1
    p = softmax(product(cache.retrieve_k(0), q) / 4**0.5)
    out = product(w_o, product(cache.retrieve_v(0), p))

    fresh = kvist.LayerCache(1, 4, capacity=6)
    fresh.append(product(w_k, words[: pos + 1])[:, None], product(w_v, words[: pos + 1])[:, None])
    projected["without"] += len(fresh)
    kernels = cache.attend(q[None])
    agree.append((same_bits(kernels, fresh.attend(q[None])), close(product(w_o, kernels[0]), out)))
    steps.append({"word": word, "len_before": before, "len_after": len(cache), "output": out.tolist()})
    print(f"{word:4} cache {before} -> {len(cache)}  ", " ".join(f"{value:+.6f}" for value in out))
floats = cache.retrieve_k(0).numel() + cache.retrieve_v(0).numel()
print(f"projections: {projected['with']} with the cache, {projected['without']} without; floats held: {floats}")

result = {"steps": steps, "cached_projections": projected["with"], "uncached_projections": projected["without"]}
result["floats_held"] = floats
checks = {"the kernels give the same bits with the cache and without": all(same for same, _ in agree)}
checks["and agree with the two products"] = all(near for _, near in agree)
assert all(checks.values()), checks
