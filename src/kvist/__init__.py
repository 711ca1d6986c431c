"""kvist: KV caches you can size, prove and reuse.

``load`` makes an engine of a model; ``LayerCache`` is the cache of one layer alone. Names are imported when first used:
``import kvist`` itself costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvist.base import errors
    from kvist.base.errors import KvistError
    from kvist.compose import LLM, Completion, Stream, load
    from kvist.engine.request import Sampling
    from kvist.layer import LayerCache

    __version__: str

__all__ = ["LLM", "Completion", "KvistError", "LayerCache", "Sampling", "Stream", "__version__", "errors", "load"]

_HOMES = {
    "LLM": "kvist.compose",
    "Completion": "kvist.compose",
    "KvistError": "kvist.base.errors",
    "LayerCache": "kvist.layer",
    "Sampling": "kvist.engine.request",
    "Stream": "kvist.compose",
    "load": "kvist.compose",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name == "errors":
        value = import_module("kvist.base.errors")
    elif name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            value = version("kvist")
        except PackageNotFoundError:  # run from a source tree that nobody installed
            value = "0+unknown"
    else:
        raise AttributeError(f"module 'kvist' has no attribute {name!r}; it offers {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
