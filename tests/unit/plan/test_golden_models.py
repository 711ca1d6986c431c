"""Published models: what their configs say must come out as the bytes that follow from them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kvist.base.errors import KvistError, MissingField, UnknownArchitecture
from kvist.plan.cost import LayerKind, Widths, kinds_of
from kvist.plan.formats import FORMATS
from kvist.spec.cache_spec import cache_spec
from kvist.spec.families import FAMILIES
from kvist.spec.kept import StateRows

DATA = Path(__file__).resolve().parents[2] / "data" / "plan_models.json"
MODELS = {model["id"]: model for model in json.loads(DATA.read_text(encoding="utf-8"))["models"]}
BF16 = Widths(FORMATS["bfloat16"], FORMATS["bfloat16"])

# Not asserted against the file's figure, with the reason.
REFUSED = {
    "Zyphra/Zamba2-7B": "the source leaves out which layers keep rows; its own note calls its figure an upper bound"
}
DISPUTED = {
    "meta-llama/Llama-3.2-11B-Vision (mllama text)": (
        "the file counts all 40 layers per text token; 8 of them are cross attention and keep image rows, as its own "
        "note says and as the model's code does: 32 layers grow"
    )
}


def config_of(published: Mapping[str, Any]) -> dict[str, Any]:
    """The config as published: nested again where the file says it was, without the file's own marks."""
    flat = {key: value for key, value in published.items() if not key.startswith(("_nested", "_outer"))}
    nested = published.get("_nested_in")
    if nested is None:
        return flat
    outer = {key.removeprefix("_outer_"): value for key, value in published.items() if key.startswith("_outer_")}
    return {**outer, nested: flat}


def kinds(name: str, widths: Widths = BF16) -> tuple[LayerKind, ...]:
    return kinds_of(cache_spec(config_of(MODELS[name]["published"])).layers, widths)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in REFUSED | DISPUTED])
def test_model(name: str) -> None:
    derived = MODELS[name]["derived"]
    layers = kinds(name)
    counts: Counter[str] = Counter()
    for kind in layers:
        counts[kind.kind] += kind.count
    assert dict(counts) == derived["layer_kinds"]
    assert sum(kind.growing for kind in layers) == Fraction(derived["growing_bytes_per_token_16bit"])
    assert sum(kind.windowed for kind in layers) == derived.get("windowed_bytes_per_token_16bit", 0)
    assert sum(kind.index for kind in layers) == Fraction(derived.get("indexer_bytes_per_token", {}).get("bf16", 0))
    bounds = {piece.bound for kind in layers for piece in kind.pieces if piece.bound}
    assert sorted(bounds) == sorted(derived.get("windows", []))


@pytest.mark.parametrize("name", [name for name in MODELS if "state_bytes_per_seq" in MODELS[name]["derived"]])
def test_state(name: str) -> None:
    wanted = MODELS[name]["derived"]["state_bytes_per_seq"]
    spec = cache_spec(config_of(MODELS[name]["published"]))
    states = [part for layer in spec.layers for part in layer.parts if isinstance(part, StateRows)]
    assert (sum(s.state for s in states), sum(s.conv for s in states)) == (wanted["ssm_elems"], wanted["conv_elems"])
    for key, state, conv in (
        ("fp32_ssm_bf16_conv", "float32", "bfloat16"),
        ("bf16_both", "bfloat16", "bfloat16"),
        ("fp32_both", "float32", "float32"),
    ):
        widths = Widths(BF16.k, BF16.v, state=FORMATS[state], conv=FORMATS[conv])
        assert sum(kind.fixed for kind in kinds_of(spec.layers, widths)) == wanted[key]


@pytest.mark.parametrize("name", [n for n in MODELS if "bytes_16bit" in MODELS[n]["derived"].get("cross", {})])
def test_cross_attention(name: str) -> None:
    assert sum(kind.fixed for kind in kinds(name)) == MODELS[name]["derived"]["cross"]["bytes_16bit"]


def test_indexer_keys_as_engines_store_them() -> None:
    fp8 = Widths(BF16.k, BF16.v, index=FORMATS["fp8"], index_scale=4)
    found = {
        name: model["derived"]["indexer_bytes_per_token"].get("vllm_fp8_128_plus_4_scale")
        for name, model in MODELS.items()
        if "indexer_bytes_per_token" in model["derived"]
    }
    compared = {name: value for name, value in found.items() if value is not None}
    assert len(compared) == 4
    for name, value in compared.items():
        assert sum(kind.index for kind in kinds(name, fp8)) == value


def test_the_disputed_model_grows_in_its_text_layers_only() -> None:
    (name,) = DISPUTED
    published = MODELS[name]["published"]
    layers = {kind.kind: kind for kind in kinds(name)}
    assert layers["cross"].count == len(published["cross_attention_layers"]) == 8
    assert sum(kind.growing for kind in layers.values()) == 32 * 2 * 8 * 128 * 2
    with_image = kinds_of(cache_spec(config_of(published)).layers, BF16, source_tokens=6404)
    assert sum(kind.fixed for kind in with_image) == 8 * 2 * 8 * 128 * 2 * 6404


def test_what_lacks_its_layer_list_is_refused_and_planned_once_it_is_there() -> None:
    (name,) = REFUSED
    published = MODELS[name]["published"]
    with pytest.raises(UnknownArchitecture, match="zamba2_groundtruth"):
        cache_spec(config_of(published))
    named = {**published, "model_type": "zamba2"}
    with pytest.raises(MissingField, match="hybrid_layer_ids"):
        cache_spec(named)
    state = {"mamba_expand": 2, "mamba_d_state": 64, "mamba_ngroups": 2, "mamba_d_conv": 4}
    whole = cache_spec({**named, **state, "hybrid_layer_ids": [6, 12, 18]})
    assert sum(kind.growing for kind in kinds_of(whole.layers, BF16)) == 3 * 2 * 32 * 224 * 2


def test_no_rule_knows_a_model_by_name() -> None:
    """Renaming a model, or dropping its names, changes nothing."""
    for model in MODELS.values():
        config = config_of(model["published"])
        try:
            plain = cache_spec(config)
        except KvistError:
            continue
        renamed = cache_spec({**config, "_name_or_path": "someone/else", "architectures": ["Renamed"]})
        assert renamed.layers == plain.layers


def test_every_family_is_met_or_at_least_reachable() -> None:
    names = [name for family in FAMILIES for name in family.model_types]
    assert len(names) == len(set(names))
    ggufs = [name for family in FAMILIES for name in family.gguf]
    assert len(ggufs) == len(set(ggufs))


def test_an_unknown_architecture_is_refused_and_guessed_when_asked() -> None:
    config = {"model_type": "brand_new", "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
    with pytest.raises(UnknownArchitecture, match=r"brand_new.*--assume-standard"):
        cache_spec(config)
    guess = cache_spec(config, assume_standard=True)
    assert guess.guess
    assert sum(kind.growing for kind in kinds_of(guess.layers, BF16)) == 3 * 2 * 64 * 2
