"""Exercise 3. Compress and decompress: what a latent can hold.

Rows made from a latent come back whole through as many directions, if a singular value decomposition finds them; other
rows lose most of themselves even there. A model trained with a latent loses nothing by caching it: the latent is what
it computes, and cached equals recomputed.
"""

import torch

import kvist
from kvist.learn import same_bits

compress, draw = kvist.latent.compress, torch.Generator().manual_seed(0)
c, up, plain = (torch.randn(shape, generator=draw) for shape in [(256, 16), (128, 16), (256, 128)])
ranks, result = (4, 8, 16, 32, 64, 128), {}
print(f"lost of 128 channels kept in {''.join(f'{rank:7}' for rank in ranks)}  floats")
for name, rows in [("from a latent of 16", compress(c, up)), ("not from a latent", plain)]:
    found = torch.linalg.svd(rows, full_matrices=False).Vh
    drawn = torch.linalg.qr(torch.randn(128, 128, generator=draw)).Q
    for way, directions in [("SVD", found), ("random", drawn)]:
        backs = [compress(compress(rows, directions[:rank]), directions[:rank].T) for rank in ranks]
        losses = result[f"{name}, {way}"] = [float((back - rows).norm() / rows.norm()) for back in backs]
        print(f"{name + ', ' + way:28} " + "".join(f"{loss:7.1%}" for loss in losses))

w_dkv, w_uk, w_uv = (torch.randn(shape, generator=draw) / 8 for shape in [(16, 64), (8, 8, 16), (8, 8, 16)])
x, q, q_rope, k_rope = (torch.randn(24, *shape, generator=draw) for shape in [(64,), (8, 8), (8, 8), (8,)])
cached, equal = torch.empty(0, 16), True
for t in range(24):
    cached = torch.cat([cached, compress(x[t : t + 1], w_dkv)])
    ways = cached, compress(x[: t + 1], w_dkv)
    outs = [kvist.latent.attend_absorbed(q[t], q_rope[t], c_kv, k_rope[: t + 1], w_uk, w_uv, 0.25) for c_kv in ways]
    equal = equal and same_bits(*outs)
print(f"MLA over cached latents at token 24: {' '.join(f'{value:+.4f}' for value in outs[0][0, :4])} ...")

whole = {name: [f"{loss:.1%}" for loss in losses].index("0.0%") for name, losses in result.items()}
checks = {"rows of a latent of 16 come back from 16 floats": ranks[whole["from a latent of 16, SVD"]] == 16}
checks["other rows only from all 128"] = ranks[whole["not from a latent, SVD"]] == 128
checks["cached MLA has the bits of recomputed MLA at all 24 tokens"] = equal
assert all(checks.values()), checks
