"""config.json to ModelSpec, fail-closed: what a runnable model needs is there and in range, or an error names it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvist.base.errors import BadValue, Corrupt, SpecError, UnknownArchitecture, UsageError
from kvist.spec.config_layers import layers_of, softcap
from kvist.spec.families import BY_MODEL_TYPE, DecoderFacts, Family, runnable_names
from kvist.spec.model import ModelSpec, Norm
from kvist.spec.read import Fields
from kvist.spec.rules import MAX_POSITION


def model_spec(config: Mapping[str, Any] | str | Path) -> ModelSpec:
    """The runnable model that ``config`` describes: a mapping, a config.json, or the folder that holds one.

    Raises UnknownArchitecture (with what is supported), MissingField, WrongType or BadValue with the field's name.
    """
    if not isinstance(config, Mapping):
        config = read_config(Path(config))
    family, fields, outer = locate(config)
    if family.decoder is None:
        raise SpecError(
            f"{fields.where}: {family.name} can be planned (`kvist plan`), but not run yet;"
            f" runnable: {runnable_names()}"
        )
    fp8_block = float8_block(fields, outer)
    if not fields.defaults:
        fields = Fields(fields.data, fields.where, family.decoder.absent)
    return _decoder(family, family.decoder, fields, outer, fp8_block)


def read_config(path: Path) -> dict[str, Any]:
    """The mapping in ``path`` (a config.json or its folder), with the stop tokens of generation_config.json added."""
    path = path / "config.json" if path.is_dir() else path
    config = _read_json(path)
    generation = path.with_name("generation_config.json")
    if generation.is_file():
        config = {**config, "_generation_eos": _read_json(generation).get("eos_token_id")}
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise Corrupt(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise Corrupt(f"{path} holds a {type(config).__name__}, not a model's settings")
    return config


def locate(config: Mapping[str, Any]) -> tuple[Family, Fields, Fields]:
    """The family row, the fields of the language model, and those of the whole config (the same unless nested)."""
    outer = Fields(config, "config.json")
    inner = outer.maybe_group("text_config")
    model_type = (inner or outer).maybe_text("model_type") or outer.maybe_text("model_type")
    if model_type is None:
        raise outer.missing("model_type")
    family = BY_MODEL_TYPE.get(model_type)
    if family is None:
        raise UnknownArchitecture(
            f"config.json: unknown architecture {model_type!r}; supported to run: {runnable_names()}"
        )
    if inner is None:
        return family, outer, outer
    # transformers writes nested configs as differences to their class, so only there may its defaults stand in.
    return family, Fields(inner.data, "config.json: text_config", family.class_defaults), outer


def _decoder(
    family: Family, facts: DecoderFacts, fields: Fields, outer: Fields, fp8_block: tuple[int, int] | None
) -> ModelSpec:
    for name, value in facts.required.items():
        if fields.flag(name, default=value) != value:
            raise BadValue(f"{fields.where}: {name} is {str(not value).lower()}: such a {family.name} cannot be run")
    for name, allowed in facts.only.items():
        value = fields.get(name)
        if value is not None and value not in allowed:
            known = " or ".join(map(repr, allowed)) or "null"
            raise BadValue(f"{fields.where}: {name} = {value!r} cannot be run in {family.name}; only {known}")
    hidden = fields.integer(*family.cache.hidden, high=2**20)
    is_layer_norm = facts.norm == "layer"
    norm = Norm(facts.norm, fields.number(*facts.norm_eps, high=1.0), facts.norm_offset, bias=is_layer_norm)
    multipliers = _multipliers(facts, fields, hidden, fields.integer(*family.cache.layers, high=10_000))
    layers = layers_of(family, facts, fields, hidden, norm, multipliers.residual)
    max_position = fields.integer(*MAX_POSITION, high=2**31)
    architectures = outer.maybe_list("architectures")
    return ModelSpec(
        architecture=str(architectures[0]) if architectures else family.name,
        family=family.name,
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size", high=2**24),
        layers=layers,
        norm=norm,
        max_position=max_position,
        tied_embeddings=_either(fields, outer, "tie_word_embeddings", facts.tied_embeddings),
        dtype=fields.maybe_text("dtype", "torch_dtype") or outer.maybe_text("dtype", "torch_dtype") or "float32",
        embedding_scale=math.sqrt(hidden) if facts.scaled_embedding else multipliers.embedding,
        logit_scale=multipliers.logits,
        logit_softcap=softcap(family, fields, "final_logit_softcapping", facts.logit_softcap, facts.caps_logits),
        learned_positions=max_position if facts.learned_positions else None,
        bos_token_id=_bos(facts, fields, outer),
        eos_token_ids=_eos(facts, fields, outer),
        mtp_layers=fields.maybe_integer(*family.cache.mtp, low=0, high=64) or 0,
        fp8_block=fp8_block,
        notes=tuple(f"{name} = {value} is the class default" for name, value in sorted(fields.assumed.items())),
    )


@dataclass(frozen=True, slots=True)
class _Multipliers:
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


def _multipliers(facts: DecoderFacts, fields: Fields, hidden: int, num_layers: int) -> _Multipliers:
    """The factors of a config that scales its embedding, the output of its branches, and its logits."""

    def of(name: str) -> float | None:
        return fields.maybe_number(name, high=1e6)

    if facts.multipliers == "granite":
        names = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        embedding, residual, divisor = (1.0 if (value := of(name)) is None else value for name in names)
        return _Multipliers(embedding, residual, 1.0 / divisor)
    if facts.multipliers == "depth":
        depth, base = of("scale_depth"), of("dim_model_base")
        return _Multipliers(
            embedding=fields.number("scale_emb", high=1e6),
            residual=1.0 if depth is None else depth / math.sqrt(num_layers),
            logits=1.0 if base is None else base / hidden,
        )
    return _Multipliers()


def float8_block(fields: Fields, outer: Fields) -> tuple[int, int] | None:
    """Rows and columns that share a factor in a float8 checkpoint; None for one that is not quantised.

    SpecError, by the method's name, for a checkpoint whose matrices are packed in another way.
    """
    for source in (fields, outer):
        settings = source.maybe_group("quantization_config")
        if settings is None:
            continue
        method = settings.maybe_text("quant_method", "quant_algo") or "unnamed"
        block = settings.maybe_list("weight_block_size")
        if method == "fp8" and block is not None and settings.maybe_text("fmt") in (None, "e4m3"):
            if len(block) != 2:
                raise BadValue(f"{settings.where}: weight_block_size has {len(block)} extents; 2 are needed")
            rows, columns = (settings.as_integer(f"weight_block_size[{i}]", n, 1, 2**16) for i, n in enumerate(block))
            return rows, columns
        bits = settings.maybe_integer("bits", "num_bits", high=64)
        width = f", {bits} bits" if bits else ""
        raise SpecError(
            f"{source.where}: this checkpoint is quantised ({method}{width}), and that cannot be run from safetensors: "
            "use the unquantised checkpoint, one in float8 with a factor for each block, or a GGUF file of the model"
        )
    return None


def _either(fields: Fields, outer: Fields, name: str, default: bool) -> bool:
    return fields.flag(name, default=outer.flag(name, default=default))


def _bos(facts: DecoderFacts, fields: Fields, outer: Fields) -> int | None:
    found = fields.maybe_integer("bos_token_id", low=0)
    if found is None:
        found = outer.maybe_integer("bos_token_id", low=0)
    return facts.bos_token_id if found is None else found


def _eos(facts: DecoderFacts, fields: Fields, outer: Fields) -> tuple[int, ...]:
    """Every stop token that the text config, the whole config or the generation settings name, in that order."""
    ids: list[int] = []
    for source, name in ((fields, "eos_token_id"), (outer, "eos_token_id"), (outer, "_generation_eos")):
        value = source.data.get(name)
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            number = source.as_integer(name, item, 0, 2**31)
            if number not in ids:
                ids.append(number)
    if not ids and facts.eos_token_id is not None:
        ids.append(facts.eos_token_id)
    return tuple(ids)
