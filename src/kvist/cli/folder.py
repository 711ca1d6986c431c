"""``kvist info FOLDER``: what a model with a config.json leaves in its cache, and what its weights take."""

from __future__ import annotations

from typing import Any

from kvist.base.machine import available_memory
from kvist.cli.summary import size
from kvist.plan.cost import Widths, kinds_of
from kvist.plan.formats import FORMATS
from kvist.plan.inputs import load_spec

_BYTES = {"bfloat16": 2, "float32": 4}


def folder(model: str) -> dict[str, Any]:
    """The facts of a folder or a config.json, as plain values. Errors as in ``kvist plan``."""
    name, spec = load_spec(model)
    wide = FORMATS["bfloat16"]
    kinds = kinds_of(spec.layers, Widths(wide, wide))
    free = available_memory()
    count, vectors = spec.parameters, spec.vectors
    sizes = {} if count is None else {form: (count - vectors) * n + vectors * 4 for form, n in _BYTES.items()}
    return {
        "model": name,
        "family": spec.family,
        "architecture": spec.architecture,
        "runs": spec.runnable,
        "cache": [
            {"layers": kind.count, "kind": kind.kind, "keeps": [piece.what for piece in kind.pieces]} for kind in kinds
        ],
        "cache_bytes_per_token": int(sum(kind.growing + kind.windowed for kind in kinds)),
        "elements": count,
        "available_bytes": free,
        "weights": {form: {"bytes": n, "fits": free is None or n <= free} for form, n in sizes.items()},
    }


def folder_lines(found: dict[str, Any]) -> list[str]:
    """The facts for people."""
    runs = "" if found["runs"] else ", which can be planned but not run yet"
    out = [f"model     {found['model']}, family {found['family']}{runs}", ""]
    for kind in found["cache"]:
        keeps = " and ".join(kind["keeps"]) or "nothing"
        out.append(f"cache     {kind['layers']} layers, each token leaves: {keeps}")
    out.append(f"          {found['cache_bytes_per_token']:,} B a token as bfloat16, windows not full")
    if found["elements"] is not None:
        free = found["available_bytes"]
        memory = "memory unknown" if free is None else f"{size(free)} of memory available"
        out += ["", f"weights   {found['elements']:,} elements, {memory}"]
        for form, fact in found["weights"].items():
            verdict = "fits" if fact["fits"] else "does not fit"
            out.append(f"          --weights {form:<10}{size(fact['bytes']):>12}  {verdict}")
    return out
