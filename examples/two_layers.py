"""Exercise 1. Two layers of two heads, a thousand tokens.

A model keeps one independent cache per layer and head, and every token adds one row to each of them. Memory grows by 2
x layers x heads x head_dim x 4 bytes per token; what is allocated is that in whole blocks, once.
"""

import sys

import torch

import kvist

LAYERS, HEADS, LENGTH = 2, 2, 1000
head_dim = int(sys.argv[1]) if len(sys.argv) > 1 else 64
draw = torch.Generator().manual_seed(0)
caches = [kvist.LayerCache(HEADS, head_dim, capacity=LENGTH) for _ in range(LAYERS)]


def held() -> int:
    """Bytes of all rows that can be read back."""
    parts = [part(head) for c in caches for part in (c.retrieve_k, c.retrieve_v) for head in range(HEADS)]
    return sum(rows.numel() * rows.element_size() for rows in parts)


result = {"head_dim": head_dim, "rows": []}
for token in range(1, LENGTH + 1):
    for cache in caches:
        cache.append(*torch.randn(2, 1, HEADS, head_dim, generator=draw))
    if token in (1, 10, 100, 1000):
        rows = [len(cache.retrieve_k(head)) for cache in caches for head in range(HEADS)]
        result["rows"].append([token, rows, held()])
        print(f"length {token:5,}: rows of each layer and head {rows}, {held():9,} bytes")
result["allocated"] = sum(cache.nbytes for cache in caches)
print(f"allocated at the start: {result['allocated']:,} bytes, {caches[0].nbytes:,} for each layer")

per_token = 2 * LAYERS * HEADS * head_dim * 4
checks = {"all layers and heads advance together": all(set(rows) == {n} for n, rows, _ in result["rows"])}
checks[f"each token adds {per_token:,} bytes"] = all(size == n * per_token for n, _, size in result["rows"])
assert all(checks.values()), checks
