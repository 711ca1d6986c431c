"""One row of data per architecture. Rules read fields of the config, never a model's name or id."""

from __future__ import annotations

from collections.abc import Mapping

from kvist.spec.facts import DecoderFacts as DecoderFacts
from kvist.spec.facts import Family as Family
from kvist.spec.family_rows import ROWS
from kvist.spec.runnable_rows import RUNNABLE

FAMILIES: tuple[Family, ...] = (
    *RUNNABLE,
    *(Family(name, model_types, gguf, rule) for name, model_types, gguf, rule in ROWS),
)
BY_MODEL_TYPE: Mapping[str, Family] = {name: family for family in FAMILIES for name in family.model_types}
BY_GGUF: Mapping[str, Family] = {name: family for family in FAMILIES for name in family.gguf}


def family_of(model_type: str | None) -> Family | None:
    """The row of ``model_type``, or None."""
    return None if model_type is None else BY_MODEL_TYPE.get(model_type)


def runnable_names() -> str:
    """The families that can be run, for messages."""
    return ", ".join(family.name for family in FAMILIES if family.decoder is not None)


def planned_names() -> str:
    """The families whose cache can be planned, for messages."""
    return ", ".join(family.name for family in FAMILIES)
