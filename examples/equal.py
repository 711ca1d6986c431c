"""Figure 27-6. Cached against recomputed, position by position.

The left column attends over a cache that grew by one token at a time; the right one projects everything again and fills
a new cache for that position alone. They agree in the digits shown, and in every bit behind them.
"""

import torch

import kvist
from kvist.learn import Generator, close, product, same_bits, sentence, softmax

w_q, w_k, w_v = Generator().matrices(3, 3, 4, 0.3)
x = torch.stack([embedding for _, embedding in sentence(width=4)[:4]])
cached, result, equal, books, digits = kvist.LayerCache(1, 3, capacity=4), [], [], [], []
for pos in range(4):
    q = product(w_q, x[pos])
    cached.append(product(w_k, x[pos : pos + 1])[:, None], product(w_v, x[pos : pos + 1])[:, None])
    fresh = kvist.LayerCache(1, 3, capacity=4)
    fresh.append(product(w_k, x[: pos + 1])[:, None], product(w_v, x[: pos + 1])[:, None])

    rows = []
    for cache in (cached, fresh):  # the book's loop: scores, probabilities, weighted values
        p = softmax(product(cache.retrieve_k(0), q) * 3**-0.5)
        rows.append(product(cache.retrieve_v(0), p))
        digits.append(close(cache.attend(q[None])[0], rows[-1]))
    equal.append(same_bits(cached.attend(q[None]), fresh.attend(q[None])))  # the kernels
    books.append(same_bits(*rows))
    shown = [" ".join(f"{value:+.4f}" for value in row) for row in rows]
    print(f"position {pos}   cached {shown[0]}   recomputed {shown[1]}   {'same bits' if equal[-1] else 'DIFFERENT'}")
    result.append({"pos": pos, "cached": rows[0].tolist(), "full": rows[1].tolist()})

checks = {
    "the kernels give the same bits at every position": all(equal),
    "the book's loop gives the same bits at every position": all(books),
    "the kernels agree with the book's loop": all(digits),
}
assert all(checks.values()), checks
