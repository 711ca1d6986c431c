"""Exercise 2. Eight query heads on one kv head.

Query heads that share a kv head read the same rows, so one copy is enough, and the cache shrinks by their number. The
grouped decoder gives the bits that eight kv heads with equal keys and values give, and that it gives without a cache.
"""

import torch

import kvist
from kvist.learn import product, same_bits

HEADS, WIDTH, TOKENS = 8, 16, 48
draw = torch.Generator().manual_seed(0)
w_q, w_k, w_v, w_o = (torch.randn(n, 128, generator=draw) / 128**0.5 for n in (HEADS * WIDTH, WIDTH, WIDTH, 128))
x = torch.randn(TOKENS, 128, generator=draw)


def decode(cache: kvist.LayerCache, kv_heads: int, tokens: torch.Tensor) -> torch.Tensor:
    """Store keys and values of ``tokens`` under each kv head; the decoder's output at the newest token."""
    k, v = (product(w, tokens)[:, None].expand(-1, kv_heads, -1) for w in (w_k, w_v))
    cache.append(k, v)
    return product(w_o, cache.attend(product(w_q, tokens[-1]).view(HEADS, WIDTH)).flatten())


grouped, full = kvist.LayerCache(1, WIDTH, capacity=TOKENS), kvist.LayerCache(HEADS, WIDTH, capacity=TOKENS)
same_as_full, same_as_recomputed = [], []
for t in range(TOKENS):
    out = decode(grouped, 1, x[t : t + 1])
    same_as_full.append(same_bits(out, decode(full, HEADS, x[t : t + 1])))
    same_as_recomputed.append(same_bits(out, decode(kvist.LayerCache(1, WIDTH, capacity=TOKENS), 1, x[: t + 1])))
print(f"eight kv heads: {full.nbytes:7,} bytes for {TOKENS} tokens")
print(f"one kv head:    {grouped.nbytes:7,} bytes, {full.nbytes / grouped.nbytes:.0f} times less")
print(f"output at token {TOKENS}: {' '.join(f'{value:+.4f}' for value in out[:4])} ...")

result = {"full": full.nbytes, "grouped": grouped.nbytes, "output": out.tolist()}
checks = {"the memory is an eighth": full.nbytes == 8 * grouped.nbytes}
checks[f"eight kv heads give the same bits at all {TOKENS} tokens"] = all(same_as_full)
checks[f"recomputing everything gives the same bits at all {TOKENS} tokens"] = all(same_as_recomputed)
assert all(checks.values()), checks
