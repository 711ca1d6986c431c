"""Exercise 4. Why rotary embedding cannot pass through the latent.

Rotating a key and expanding it from the latent do not commute, except at distance 0. Absorption folds the expansion
into the query once for all keys; with a rotation between them it would need another matrix at every distance. A small
rotated key beside the latent, which needs no expansion, carries position instead.
"""

import torch

import kvist
from kvist.learn import close, product, rotate

H, D, C, T = 8, 8, 16, 65
draw = torch.Generator().manual_seed(0)
w_uk, w_uv, c_kv, q = (torch.randn(s, generator=draw) for s in [(H, D, C), (H, D, C), (T, C), (H, D)])
k, v = kvist.latent.expand(c_kv, w_uk, w_uv)
once = kvist.latent.absorb(q[None], w_uk)[0]
result = []
print("distance   |R W - W R| / |W|   wrong scores: absorbed once   absorbed at each distance")
for distance in (0, 1, 2, 4, 8, 16, 32, 64):
    rotated = rotate(w_uk.transpose(1, 2), distance).transpose(1, 2)  # R W: expand, then rotate
    turned = torch.stack([product(w, rotate(torch.eye(C), distance)).T for w in w_uk])  # W R: rotate the latent
    scores = torch.einsum("hd,thd->ht", q, rotate(k, distance))
    each = kvist.latent.absorb(q[None], rotated)[0]
    ways = product(once, rotate(c_kv, distance)).T, product(each, c_kv).T
    wrong = [float((way - scores).norm() / scores.norm()) for way in ways]
    result.append([distance, float((rotated - turned).norm() / w_uk.norm()), *wrong])
    print("{:8}   {:17.3f}   {:27.1%}   {:25.1%}".format(*result[-1]))

q_rope, k_rope = (rotate(torch.randn(n, D, generator=draw), at) for n, at in [(H, T - 1), (T, torch.arange(T))])
cache = kvist.LayerCache(H, 2 * D, D, capacity=T)
cache.append(torch.cat([k, k_rope[:, None].expand(T, H, D)], 2), v)
expanded = cache.attend(torch.cat([q, q_rope], 1), scale=0.25)
beside = kvist.latent.attend_absorbed(q, q_rope, c_kv, k_rope, w_uk, w_uv, 0.25)

checks = {"the two orders agree at distance 0 and nowhere else": [row[1] > 0 for row in result] == [False] + [True] * 7}
checks["absorbed at each distance, the scores are right"] = {f"{row[3]:.1%}" for row in result} == {"0.0%"}
checks["with a rotated key beside the latent, absorbed equals expanded"] = close(beside, expanded)
assert all(checks.values()), checks
