"""Names and widths of element types. No torch: the planner counts bytes without it."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.base.errors import UsageError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type. ``bits`` is the width of one stored element, scales not included."""

    name: str
    bits: int

    @property
    def bytes(self) -> int:
        """Bytes of one element; a UsageError for types narrower than a byte."""
        if self.bits % 8:
            raise UsageError(f"{self.name} has {self.bits} bits: its elements have no whole number of bytes")
        return self.bits // 8


FLOAT32 = DType("float32", 32)
BFLOAT16 = DType("bfloat16", 16)
FLOAT16 = DType("float16", 16)
INT8 = DType("int8", 8)
INT4 = DType("int4", 4)

DTYPES = {dtype.name: dtype for dtype in (FLOAT32, BFLOAT16, FLOAT16, INT8, INT4)}
_SHORT = {"f32": FLOAT32, "fp32": FLOAT32, "bf16": BFLOAT16, "f16": FLOAT16, "fp16": FLOAT16, "half": FLOAT16}


def parse_dtype(name: str, *, allowed: tuple[DType, ...] = tuple(DTYPES.values())) -> DType:
    """The element type called ``name`` (long or usual short form).

    Raises UsageError that lists what is allowed when the name is unknown or not among ``allowed``.
    """
    dtype = DTYPES.get(name) or _SHORT.get(name)
    if dtype is None or dtype not in allowed:
        known = ", ".join(d.name for d in allowed)
        raise UsageError(f"unknown element type {name!r}: use one of {known}")
    return dtype
