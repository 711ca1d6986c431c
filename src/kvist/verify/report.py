"""What a verification found, as records and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where two paths part: the first position, and there the first operation (of its layer) whose result differs."""

    position: int
    layer: int | None
    operation: str
    largest: float  # absolute, over the logits of that position
    elements: int  # how many logits of that position differ


@dataclass(frozen=True, slots=True)
class LawRow:
    """One law on one path. ``equal`` is None when the path did not run as it should: not exercised, which fails."""

    name: str
    path: str
    positions: int
    equal: bool | None
    first_difference: FirstDifference | None = None
    detail: str = ""
    dtype: str = ""
    kernels: str = ""

    @property
    def holds(self) -> bool:
        """Whether the path ran and every compared position was equal."""
        return self.equal is True


@dataclass(frozen=True, slots=True)
class Report:
    """Every row of a verification, with the fingerprint of each kernel set that ran."""

    model: str
    fingerprint: str
    laws: tuple[LawRow, ...]

    @property
    def holds(self) -> bool:
        """Whether there are rows and all hold."""
        return bool(self.laws) and all(row.holds for row in self.laws)

    def json(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)
