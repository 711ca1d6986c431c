"""Figure 27-2. The cache grows by one column per token.

Each token adds one column to the keys of a head and one to its values; darker is larger, and the column behind the bar
is the new one. What stood there before is neither computed nor written again.
"""

import torch

import kvist
from kvist.learn import Generator, product, same_bits, sentence


def shaded(row: list[float], limit: float = 0.3) -> str:
    glyphs = ["·░▒▓█"[max(0, min(4, int(5 * (value + limit) / (2 * limit))))] * 2 for value in row]
    return "".join(glyphs[:-1]) + "|" + glyphs[-1]


w_q, w_k, w_v = Generator().matrices(3, 4, 6, 0.2)
cache, kept, result = kvist.LayerCache(1, 4, capacity=6), True, []
before = torch.empty(4, 0), torch.empty(4, 0)
for pos, (word, x) in enumerate(sentence()):
    cache.store_k(0, pos, product(w_k, x))
    cache.store_v(0, pos, product(w_v, x))
    columns = cache.retrieve_k(0).T, cache.retrieve_v(0)  # [width, tokens]
    kept = kept and all(same_bits(new[:, :pos], old) for new, old in zip(columns, before, strict=True))
    before = tuple(part.clone() for part in columns)
    for channel, (k, v) in enumerate(zip(*(part.tolist() for part in columns), strict=True)):
        label = (f"{word:4} length {len(cache)}", "K", "V") if channel == 0 else ("", "", "")
        print(f"{label[0]:16} {label[1]:1} {shaded(k):14} {label[2]:1} {shaded(v)}")
    result.append([word, [part.tolist() for part in columns]])

checks = {
    "one column per token": [len(columns[0][0]) for _, columns in result] == list(range(1, 7)),
    "no earlier column changed a bit": kept,
}
assert all(checks.values()), checks
