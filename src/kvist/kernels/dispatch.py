"""Chooses the backend: the best native variant, else the reference, and says why others were passed over."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvist.base.errors import NoBackend
from kvist.kernels.native import NativeBackend, variants
from kvist.kernels.ops import Backend
from kvist.kernels.reference import ReferenceBackend

VARIABLE = "KVIST_KERNELS"  # forces a variant by name, or "reference"


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, and for every other one the reason why it was passed over."""

    backend: Backend
    refusals: tuple[tuple[str, str], ...]


def choose(threads: int | None = None, wanted: str | None = None) -> Choice:
    """The best backend of this machine, or the one called ``wanted`` (default: what ``KVIST_KERNELS`` says).

    Raises NoBackend, with every name that would do, when the wanted one does not exist here.
    """
    wanted = wanted or os.environ.get(VARIABLE) or None
    known = variants()
    unbuilt = "the native part is not built: install a C++20 compiler and reinstall kvist"
    if wanted is None or wanted == "native":
        if known:
            rest = tuple((name, f"{known[0]} is faster here") for name in [*known[1:], "reference"])
            return Choice(NativeBackend(known[0], threads), rest)
        if wanted == "native":
            raise NoBackend(f"{VARIABLE}=native: {unbuilt}")
        return Choice(ReferenceBackend(), (("native", unbuilt),))
    if wanted == "reference":
        return Choice(ReferenceBackend(), tuple((name, f"{VARIABLE}=reference") for name in known))
    if wanted in known:
        rest = tuple((name, f"{VARIABLE}={wanted}") for name in [*(v for v in known if v != wanted), "reference"])
        return Choice(NativeBackend(wanted, threads), rest)
    names = ", ".join([*known, "reference"])
    reason = f"this machine runs {names}" if known else unbuilt
    raise NoBackend(f"no kernels called {wanted!r}: {reason}; unset {VARIABLE} or use one of {names}")


def best_backend(threads: int | None = None) -> Backend:
    """The backend of ``choose``."""
    return choose(threads).backend
