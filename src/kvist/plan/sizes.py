"""Sizes and counts as people write them: 24GiB, 80 GB, 32k, 128K, 1.5e6."""

from __future__ import annotations

import re

from kvist.base.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_COUNTS = {"": 1, "k": 1024, "m": 1024**2}
_FORM = re.compile(r"^\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")
_MOST = 2**60


def parse_size(text: str, name: str = "size") -> int:
    """Bytes: a number with an optional unit (GB is 10^9, GiB and G are 2^30). UsageError names ``name``."""
    return _parse(text, name, _UNITS, "24GiB, 80GB or 17179869184")


def parse_count(text: str, name: str = "count") -> int:
    """Tokens or requests: a number, with k for 1024 and m for 1024^2. UsageError names ``name``."""
    return _parse(text, name, _COUNTS, "4096, 32k or 1m")


def _parse(text: str, name: str, units: dict[str, int], examples: str) -> int:
    match = _FORM.match(text)
    factor = units.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{name} is {text!r}: write it like {examples}")
    value = int(float(match.group(1).replace("_", "").replace(",", "")) * factor)
    if not 0 < value <= _MOST:
        raise UsageError(f"{name} is {text!r}: it must be above 0 and at most 2^60")
    return value


def show_bytes(size: float) -> str:
    """Bytes with the binary unit that keeps the number short."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"


def show_count(value: float) -> str:
    """A number with thousands separated; a fraction keeps two digits."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"
