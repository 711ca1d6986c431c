"""kvist: KV caches you can size, prove and reuse.

``load`` makes an engine of a model; ``LayerCache`` is the cache of one layer alone; ``plan`` says what a cache costs;
``latent`` holds the functions of multi-head latent attention, and fits latents to a model that has none. Names are
imported when first used: ``import kvist`` itself costs no torch.
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
    from kvist.learn import latents as latent
    from kvist.plan.plan import plan

    __version__: str

__all__ = [
    "LLM",
    "Completion",
    "KvistError",
    "LayerCache",
    "Sampling",
    "Stream",
    "__version__",
    "errors",
    "latent",
    "load",
    "plan",
]

_HOMES = {
    "LLM": "kvist.compose",
    "Completion": "kvist.compose",
    "KvistError": "kvist.base.errors",
    "LayerCache": "kvist.layer",
    "Sampling": "kvist.engine.request",
    "Stream": "kvist.compose",
    "load": "kvist.compose",
}
# Whole modules. ``plan`` can be called: it and its verb have one name.
_MODULES = {"errors": "kvist.base.errors", "latent": "kvist.learn.latents", "plan": "kvist.plan"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = import_module(_MODULES[name])
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
