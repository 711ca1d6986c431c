"""The theory of the KV cache, run live: what the scripts in ``examples/`` share, and what ``kvist learn`` runs.

For scripts: ``Generator``, ``sentence``, ``product``, ``softmax``, ``rotate``, ``same_bits``, ``close``, ``prose`` and
``StepTimer``. Names are imported when first used, so that the list of topics costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvist.learn.book import Generator, close, product, prose, rotate, same_bits, sentence, softmax
    from kvist.learn.timing import StepTimer

__all__ = ["Generator", "StepTimer", "close", "product", "prose", "rotate", "same_bits", "sentence", "softmax"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvist.learn' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module("kvist.learn.timing" if name == "StepTimer" else "kvist.learn.book"), name)
    globals()[name] = value
    return value
