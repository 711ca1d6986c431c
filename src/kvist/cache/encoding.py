"""How the elements of a row are written down: today the plain float types."""

from __future__ import annotations

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from kvist.base.errors import LayoutMismatch

PLAIN = (FLOAT32, BFLOAT16, FLOAT16)


def elements_per_pair(dtype: DType) -> int:
    """How many neighbours lie together for one dot-product instruction: 2 for bfloat16, else 1."""
    return 2 if dtype == BFLOAT16 else 1


def check_plain(dtype: DType, key_width: int, block_size: int) -> None:
    """Refuse (LayoutMismatch) a type without a block format, or widths that its pairs do not divide."""
    if dtype not in PLAIN:
        raise LayoutMismatch(
            f"a cache of {dtype.name} has no block format yet: use one of {', '.join(plain.name for plain in PLAIN)}"
        )
    pair = elements_per_pair(dtype)
    if key_width % pair:
        raise LayoutMismatch(
            f"keys of width {key_width} cannot be stored as {dtype.name}: they lie in pairs along the width, "
            f"and {key_width} is odd; use float16 or float32"
        )
    if block_size % pair:
        raise LayoutMismatch(
            f"a block of {block_size} positions cannot hold {dtype.name} values: they lie in pairs of positions, "
            f"and {block_size} is odd"
        )
