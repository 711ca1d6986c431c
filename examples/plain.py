"""The plain interface: attention as two products of a matrix and a vector.

Keys are handed out as [positions, width] and values as [width, positions], so scores are K q and the output is V p,
with nothing to mask: the future was never stored. The engine's own attention over the same cells agrees.
"""

import torch

import kvist
from kvist.learn import close

KV_HEADS, HEADS, WIDTH, TOKENS = 2, 6, 64, 200
draw = torch.Generator().manual_seed(0)
k, v = torch.randn(2, TOKENS, KV_HEADS, WIDTH, generator=draw)
q = torch.randn(TOKENS, HEADS, WIDTH, generator=draw)
cache = kvist.LayerCache(KV_HEADS, WIDTH, capacity=TOKENS)
agree, result = [], []
for pos in range(TOKENS):
    for head in range(KV_HEADS):
        cache.store_k(head, pos, k[pos, head])
        cache.store_v(head, pos, v[pos, head])
    keys, values = ([part(head) for head in range(KV_HEADS)] for part in (cache.retrieve_k, cache.retrieve_v))
    out = torch.empty(HEADS, WIDTH)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        out[head] = values[group] @ torch.softmax(keys[group] @ q[pos, head] / WIDTH**0.5, 0)
    kernels = cache.attend(q[pos])
    agree.append(close(kernels, out))
    if pos in (0, 9, 99, 199):
        result.append([pos, out[0, :3].tolist(), kernels[0, :3].tolist()])
        shown = [" ".join(f"{value:+.5f}" for value in row) for row in result[-1][1:]]
        print(f"position {pos:3}  K {list(keys[0].shape)}, V {list(values[0].shape)}".ljust(40), end="")
        print(f"by hand {shown[0]}   kernels {shown[1]}")

checks = {f"both agree for all {HEADS} heads at all {TOKENS} positions": all(agree)}
assert all(checks.values()), checks
