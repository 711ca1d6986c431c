"""Logits to ids, with one counter-based random stream per request.

The draw for a token is a function of the request's logits row, its settings, its seed and the token's index among the
generated ones, and of nothing else: no neighbour, batch or restart can change it. Exactly one uniform is used per
token. Every row is worked on alone, in one fixed order of operations, in float64.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvist.base.errors import KernelError
from kvist.engine.request import SEEDS

if TYPE_CHECKING:
    from kvist.engine.request import Sampling

_PAGE = 512  # tokens summed at once while searching the cumulative distribution; part of the order of additions
_STRIDE = 64  # logits per maximum while searching the top-k threshold; changes speed, never the result
_BUCKET_SHIFT = 46  # of a float64's bits: leaves sign, exponent and 6 bits, 64 buckets per factor of two
_FIRST_BUCKET = (0x3FF - 64) << 6  # lighter than 2**-64 of the likeliest: all in one bucket
_COUNTERS = 1 << 256


def fresh_seed() -> int:
    """A seed for a request that asked for none, from the operating system."""
    return secrets.randbelow(SEEDS)


def uniform(seed: int, index: int) -> float:
    """The uniform in [0, 1) of the ``index``-th generated token: Philox4x64-10 (Salmon et al., 2011) at that counter.

    The top 53 bits of the block's first word. Any index can be asked for at any time, so nothing needs to be saved.
    """
    # numpy counts up before it computes a block.
    word = np.random.Philox(counter=(index - 1) % _COUNTERS, key=seed).random_raw()
    return (int(word) >> 11) * 2.0**-53


def sample(logits: NDArray[np.float32], sampling: Sampling, seed: int, index: int) -> int:
    """The next token id from one row of ``logits`` [vocab]; ``index`` counts the request's generated tokens from 0.

    Raises KernelError when a logit is NaN or +inf, or when all are -inf.
    """
    best = int(np.argmax(logits))  # the first of equals; a NaN counts as the largest, so it cannot hide
    top = float(logits[best])
    if not np.isfinite(top):
        raise KernelError(f"the largest logit, of token {best}, is {top}: the model computed no distribution")
    if sampling.greedy:
        return best
    ids, weights = _kept(logits, top, sampling)
    place = _search(weights, uniform(seed, index))
    return place if ids is None else int(ids[place])


def distribution(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    """The probabilities [vocab] that ``sample`` draws from, by the definition and without its short cuts.

    For tests and for readers: a full stable sort, likeliest first, ties by ascending id.
    """
    wide = logits.astype(np.float64)
    if sampling.greedy:
        return np.where(np.arange(len(wide)) == np.argmax(wide), 1.0, 0.0)
    weights = np.exp((wide - wide.max()) / sampling.temperature)
    order = np.argsort(-wide, kind="stable")[: sampling.top_k or None]
    if sampling.top_p is not None and sampling.top_p < 1:
        order = order[np.argsort(-weights[order], kind="stable")]
        mass = np.cumsum(weights[order])
        order = order[: int(np.searchsorted(mass, sampling.top_p * mass[-1])) + 1]
    if sampling.min_p:
        order = order[weights[order] >= sampling.min_p]  # the likeliest has weight 1
    kept = np.zeros_like(weights)
    kept[order] = weights[order]
    result: NDArray[np.float64] = kept / kept.sum()
    return result


def _kept(
    logits: NDArray[np.float32], top: float, sampling: Sampling
) -> tuple[NDArray[np.intp] | None, NDArray[np.float64]]:
    """Ids, ascending (None: all of them), and their unnormalised weights: the largest is 1, tokens left out have 0."""
    ids = None
    if sampling.top_k and sampling.top_k < len(logits):
        ids = _largest(logits, sampling.top_k)
        logits = logits[ids]
    weights = logits.astype(np.float64)  # a fresh contiguous row: the same vector path whatever the input's alignment
    weights -= top
    weights /= sampling.temperature
    np.exp(weights, out=weights)
    # Zeroing is several times faster than gathering: a dense random mask defeats the branch predictor.
    if sampling.top_p is not None and sampling.top_p < 1:
        _keep_nucleus(weights, sampling.top_p)
    if sampling.min_p:
        weights *= weights >= sampling.min_p
    return ids, weights


def _largest(logits: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Ids of the ``count`` largest logits, ascending; of equals at the border the lowest ids stay."""
    threshold = _lower_bound(logits, count)
    near = np.flatnonzero(logits >= threshold)
    values = logits[near]
    border = np.partition(values, len(values) - count)[len(values) - count]
    above = near[values > border]
    equal = near[values == border][: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _lower_bound(logits: NDArray[np.float32], count: int) -> np.float32:
    """A value that at least ``count`` logits reach: the ``count``-th largest of the maxima of disjoint sets."""
    sets = len(logits) // _STRIDE
    if sets < count:
        return np.float32(logits.min())
    maxima = logits[: sets * _STRIDE].reshape(_STRIDE, sets).max(axis=0)
    return np.float32(np.partition(maxima, sets - count)[sets - count])


def _keep_nucleus(weights: NDArray[np.float64], top_p: float) -> None:
    """Zero all but the fewest heaviest weights that sum to ``top_p`` of all; of equals the lowest ids stay.

    A histogram over the weights' leading bits finds the bucket where the sum is reached; only that one is sorted.
    """
    buckets = weights.view(np.int64) >> _BUCKET_SHIFT  # ascending with the weight, which is never negative
    buckets -= _FIRST_BUCKET
    np.maximum(buckets, 0, out=buckets)
    mass = np.bincount(buckets, weights)[::-1].cumsum()  # from the heaviest bucket down
    target = top_p * mass[-1]
    place = int(np.searchsorted(mass, target))
    border = len(mass) - 1 - place
    sure = mass[place - 1] if place else 0.0
    ids = np.flatnonzero(buckets == border)
    ids = ids[np.argsort(-weights[ids], kind="stable")]
    count = int(np.searchsorted(sure + np.cumsum(weights[ids]), target)) + 1
    kept = weights[ids[:count]]
    weights *= buckets > border
    weights[ids[:count]] = kept


def _search(weights: NDArray[np.float64], u: float) -> int:
    """The first place whose cumulative weight exceeds ``u`` of the total: by pages, then within one page."""
    pages = -(-len(weights) // _PAGE)
    if pages > 1:
        padded = np.zeros(pages * _PAGE)
        padded[: len(weights)] = weights
        mass = np.cumsum(padded.reshape(pages, _PAGE).sum(axis=1))
        target = u * mass[-1]
        page = _first_above(mass, target)
        before = mass[page - 1] if page else 0.0
        inside = np.cumsum(padded[page * _PAGE : (page + 1) * _PAGE])
        return page * _PAGE + _first_above(inside, target - before)
    mass = np.cumsum(weights)
    return _first_above(mass, u * mass[-1])


def _first_above(mass: NDArray[np.float64], target: float) -> int:
    """The first place where ``mass`` exceeds ``target``; if rounding left none, the last place that has weight."""
    place = int(np.searchsorted(mass, target, side="right"))
    return place if place < len(mass) else int(np.searchsorted(mass, mass[-1]))
