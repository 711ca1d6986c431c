"""Figure 27-1. Projection work, with a cache and without.

Without a cache every new token computes the keys and values of all tokens before it again, n(n + 1)/2 in all; with one
it computes only its own, (n + 1)/2 times less. Scoring stays: each query meets every key either way, so the cache
removes projections, not comparisons.
"""

import torch

import kvist
from kvist.learn import product, same_bits

draw = torch.Generator().manual_seed(0)
x, w_k, w_v = (torch.randn(shape, generator=draw) for shape in [(4096, 6), (4, 6), (4, 6)])
projected = {"without": 0, "with": 0}


def project(way: str, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    projected[way] += len(tokens)
    return product(w_k, tokens)[:, None], product(w_v, tokens)[:, None]


cache, compared, equal, result = kvist.LayerCache(1, 4, capacity=len(x)), 0, True, []
print("tokens   without a cache   with one   times less   comparisons, either way")
for n in range(1, len(x) + 1):
    cache.append(*project("with", x[n - 1 : n]))
    k, v = project("without", x[:n])
    compared += len(cache)
    if n in (10, 100, 1000, 4096):
        fresh = kvist.LayerCache(1, 4, capacity=len(x))
        fresh.append(k, v)
        equal = equal and same_bits(cache.attend(x[n - 1 : n, :4]), fresh.attend(x[n - 1 : n, :4]))
        result.append([n, projected["without"], projected["with"], projected["without"] / projected["with"]])
        print("{:6,}   {:15,}   {:8,}   {:10.1f}".format(*result[-1]), f"  {compared:23,}")

checks = {"the counts are n(n + 1)/2 and n": all([a, b] == [n * (n + 1) // 2, n] for n, a, b, _ in result)}
checks["both ways attend to the same bits at every length shown"] = equal
assert all(checks.values()), checks
