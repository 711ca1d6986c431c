"""Typed, fail-closed lookup in a mapping from a file: a field is right, absent on purpose, or a named error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvist.base.errors import BadValue, MissingField, WrongType


@dataclass(slots=True)
class Fields:
    """Look-ups in ``data``, with ``where`` in every message. ``null`` counts as absent.

    ``defaults`` holds the values that an architecture's own class gives to absent fields; they are used only where the
    caller passes no default of its own, and each use is recorded in ``assumed``. Names are tried in the order given.
    """

    data: Mapping[str, Any]
    where: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    assumed: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """The value under ``name`` (a dotted name looks into nested mappings), or None."""
        value: Any = self.data
        for step in (name,) if name in self.data else name.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
        return value

    def present(self, *names: str) -> str | None:
        """The first of ``names`` that holds a value, or None."""
        return next((name for name in names if self.get(name) is not None), None)

    def raw(self, *names: str) -> tuple[str, Any] | None:
        """Name and value of the first present field, a class default, or None."""
        name = self.present(*names)
        if name is not None:
            return name, self.get(name)
        for name in names:
            if self.defaults.get(name) is not None:
                self.assumed[name] = self.defaults[name]
                return name, self.defaults[name]
        return None

    def missing(self, *names: str, why: str = "") -> MissingField:
        """The error for absent ``names``."""
        wanted = " or ".join(repr(n) for n in names)
        return MissingField(f"{self.where}: {wanted} is missing{f' ({why})' if why else ''}; add the field")

    def integer(self, *names: str, low: int = 1, high: int = 2**31) -> int:
        """The integer under one of ``names``; MissingField, WrongType or BadValue (outside low..high) otherwise."""
        value = self.maybe_integer(*names, low=low, high=high)
        if value is None:
            raise self.missing(*names)
        return value

    def maybe_integer(self, *names: str, low: int = 1, high: int = 2**31) -> int | None:
        """Like ``integer``, but None when absent."""
        found = self.raw(*names)
        return None if found is None else self.as_integer(found[0], found[1], low, high)

    def as_integer(self, name: str, value: Any, low: int, high: int) -> int:
        """``value`` as an integer in low..high; a float without fraction is accepted (3.0 is 3)."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise WrongType(f"{self.where}: {name} must be an integer, is {_shown(value)}")
        if not low <= value <= high:
            raise BadValue(f"{self.where}: {name} = {_shown(value)} is outside {low}..{high}")
        return value

    def number(self, *names: str, above: float = 0.0, high: float = 1e12) -> float:
        """The finite number under one of ``names``, above ``above`` and at most ``high``."""
        value = self.maybe_number(*names, above=above, high=high)
        if value is None:
            raise self.missing(*names)
        return value

    def maybe_number(self, *names: str, above: float = 0.0, high: float = 1e12) -> float | None:
        """Like ``number``, but None when absent."""
        found = self.raw(*names)
        if found is None:
            return None
        name, value = found
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WrongType(f"{self.where}: {name} must be a number, is {_shown(value)}")
        if not math.isfinite(value) or not above < value <= high:
            raise BadValue(f"{self.where}: {name} = {value} must be above {above} and at most {high}")
        return float(value)

    def flag(self, *names: str, default: bool | None = None) -> bool:
        """The boolean under one of ``names``; ``default`` when absent, MissingField when there is none."""
        found = self.raw(*names)
        if found is None:
            if default is None:
                raise self.missing(*names)
            return default
        if not isinstance(found[1], bool):
            raise WrongType(f"{self.where}: {found[0]} must be true or false, is {_shown(found[1])}")
        return found[1]

    def maybe_text(self, *names: str) -> str | None:
        """The string under one of ``names``, or None."""
        found = self.raw(*names)
        if found is None:
            return None
        if not isinstance(found[1], str):
            raise WrongType(f"{self.where}: {found[0]} must be a string, is {_shown(found[1])}")
        return found[1]

    def maybe_list(self, *names: str, length: int | None = None) -> list[Any] | None:
        """The list under one of ``names``, or None; BadValue when its length is not ``length``."""
        found = self.raw(*names)
        if found is None:
            return None
        name, value = found
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise WrongType(f"{self.where}: {name} must be a list, is {_shown(value)}")
        if length is not None and len(value) != length:
            raise BadValue(f"{self.where}: {name} has {len(value)} entries, but the model has {length} layers")
        return list(value)

    def maybe_group(self, name: str) -> Fields | None:
        """The mapping under ``name`` as Fields of its own, or None."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise WrongType(f"{self.where}: {name} must be a mapping, is {_shown(value)}")
        return Fields(value, f"{self.where}: {name}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
