"""Exercise 5. A circular buffer: bounded memory, any number of tokens.

A new token takes the place of the oldest. The output equals, bit for bit, recomputing everything under a mask of that
window, but not the newest tokens run alone: the rows of a second layer still carry what was dropped.
"""

import torch

import kvist
from kvist.learn import product, same_bits

WINDOW, WIDTH, TOKENS = 8, 16, 50
draw = torch.Generator().manual_seed(0)
x = torch.randn(TOKENS, WIDTH, generator=draw)
layers = [[torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5 for _ in range(3)] for _ in range(2)]


def run(caches: list[kvist.LayerCache], tokens: torch.Tensor) -> torch.Tensor:
    for cache, weights in zip(caches, layers, strict=True):
        q, k, v = (product(w, tokens)[:, None] for w in weights)
        cache.append(k, v)
        tokens = tokens + cache.attend(q)[:, 0]
    return tokens


rings = [kvist.LayerCache(1, WIDTH, addressing="ring", capacity=WINDOW, chunk=1) for _ in layers]
result, equal = [], []
for n in range(1, TOKENS + 1):
    new, other = ([kvist.LayerCache(1, WIDTH, capacity=TOKENS, window=WINDOW) for _ in layers] for _ in range(2))
    out, masked, cut = (run(*p)[-1] for p in [(rings, x[n - 1 : n]), (new, x[:n]), (other, x[:n][-WINDOW:])])
    equal.append(same_bits(out, masked))
    result.append([n, rings[0].positions, sum(ring.nbytes for ring in rings), float((out - cut).norm() / out.norm())])
    if n in (1, 8, 9, 20, 50):
        print("length {:2}: rows {}, {:,} bytes; off from those tokens alone: {:.1%}".format(*result[-1]))

checks = {f"masked recomputation gives the same bits at all {TOKENS} tokens": all(equal)}
checks["the memory never grew"] = len({nbytes for _, _, nbytes, _ in result}) == 1
checks["a cut prompt differs as soon as a row is dropped"] = all((n > WINDOW) == (off > 0) for n, _, _, off in result)
assert all(checks.values()), checks
