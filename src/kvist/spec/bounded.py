"""A model in bounded memory: every query sees the first positions and the newest ones. Another function, said so."""

from __future__ import annotations

from dataclasses import replace

from kvist.base.errors import SpecError, UsageError
from kvist.spec.model import Attention, ModelSpec


def bounded(spec: ModelSpec, window: int, sinks: int = 0) -> ModelSpec:
    """``spec`` with no layer seeing more than its first ``sinks`` positions and the newest ``window``.

    Positions stay absolute and nothing is rotated again (Xiao et al., 2023, shift theirs). Layers whose own window is
    no larger keep it. UsageError for a window that sees nothing; SpecError for layers without keys and values.
    """
    if window < 1:
        raise UsageError(f"a window of {window} keys sees nothing: use 1 or more")
    if sinks < 0:
        raise UsageError(f"{sinks} sinks: keep 0 or more first positions")
    layers = []
    for index, layer in enumerate(spec.layers):
        attention = layer.attention
        if not isinstance(attention, Attention):
            raise SpecError(f"layer {index} is of kind {type(attention).__name__}: only keys and values can be bounded")
        if attention.window is None or attention.window > window:
            layer = replace(layer, attention=replace(attention, window=window, sinks=max(sinks, attention.sinks)))
        layers.append(layer)
    seen = f"the newest {window} keys" + (f" and the first {sinks}" if sinks else "")
    note = f"bounded: a query sees {seen} at most, which is another function than full attention"
    return replace(spec, layers=tuple(layers), notes=(*spec.notes, note))
